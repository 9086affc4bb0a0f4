"""transformers' own `generate` as a further mode of a bench: the same model, dtype, tokens and process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch

from foredraft.engine.llm import LLM
from foredraft.errors import ConfigError
from foredraft.measure.bench import Mode
from foredraft.measure.figures import Sample
from foredraft.models.load import find_model
from foredraft.sampling.params import SamplingParams


def transformers_mode(llm: LLM, prompt_ids: Sequence[Sequence[int]], params: SamplingParams) -> Mode:
    """Loads the engine's model once more through transformers; answers greedily, one prompt at a time.

    `ttft` is the whole latency, since `generate` hands over all tokens at once.
    Raises `ConfigError` when transformers cannot read the model.
    """
    model = _load(llm)
    ends = sorted({*llm.model.config.eos_token_ids, *(params.stop_token_ids or ())})
    options = {
        "do_sample": False,
        "max_new_tokens": params.max_tokens,
        "eos_token_id": None if params.ignore_eos else ends or None,
        "pad_token_id": ends[0] if ends else 0,
    }

    def run(group: Sequence[int]) -> list[Sample]:
        samples = []
        for index in group:
            ids = torch.tensor([list(prompt_ids[index])], device=llm.model.device)
            start = perf_counter()
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens = found[0, ids.shape[1] :].tolist()
            took = perf_counter() - start
            samples.append(Sample(index, tokens, took, took))
        return samples

    return run


def _load(llm: LLM) -> Any:
    from transformers import AutoModelForCausalLM

    path = find_model(llm.config.model)
    options: dict[str, Any] = {"dtype": getattr(torch, llm.config.dtype), "local_files_only": True}
    directory = path
    if path.is_file():
        if find_spec("accelerate") is None:
            raise ConfigError(
                "--compare-transformers: transformers reads .gguf files with the package accelerate, which "
                "is not installed: pip install accelerate"
            )
        directory, options["gguf_file"] = path.parent, path.name
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(directory, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--compare-transformers: transformers cannot load {path}: {error}") from error
    return model.to(llm.model.device).eval()
