"""A mixture of experts: the measured curve shows what waking experts costs, and draft lengths shrink with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import Session, save_tiny

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.engine import calibration
from foredraft.engine.admission import best_lengths
from foredraft.engine.calibration import measure_costs
from foredraft.engine.costs import CostCurve

EXPERTS, CHOSEN, GAMMA = 8, 2, 7

pytestmark = pytest.mark.usefixtures("one_thread")


class Woken:
    """Counts the experts that each forward wakes, over all layers, by the tokens of the forward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.by_tokens: dict[int, list[int]] = {}
        self._now = 0
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._count)

    def _count(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        logits = torch.nn.functional.linear(inputs[0].flatten(0, -2), module.weight)
        self._now += len(logits.topk(CHOSEN, -1).indices.unique())

    def take(self, num_tokens: int) -> int:
        """The experts of the forward that ended."""
        count, self._now = self._now, 0
        self.by_tokens.setdefault(num_tokens, []).append(count)
        return count


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    # An odd size would do for us, but not for torch's grouped products.
    save_tiny(path, "mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=56)
    return path


@pytest.fixture
def llm(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=GAMMA, adaptive=False)
    return LLM(str(directory), dtype="float32", skip_tokenizer_init=True, max_model_len=96, speculative=speculative)


def measured(llm: LLM, monkeypatch: pytest.MonkeyPatch, *, per_expert: float) -> tuple[CostCurve, Woken]:
    """The cost curve on a machine where a forward takes one second and `per_expert` for each expert that it wakes."""
    woken, clock = Woken(llm.model._model), [0.0]

    class Timed:
        def __getattr__(self, name: str) -> Any:
            return getattr(llm.model, name)

        def forward(self, batch: Any, *arguments: Any) -> Any:
            output = llm.model.forward(batch, *arguments)
            clock[0] += 1.0 + per_expert * woken.take(len(batch.input_ids))
            return output

    monkeypatch.setattr(calibration, "perf_counter", lambda: clock[0])
    assert llm.engine.drafter is not None
    costs = measure_costs(Timed(), llm.engine.cache, llm.engine.drafter, gamma=GAMMA, max_num_seqs=4, budget=1e6)
    return costs, woken


def experts_at_work(llm: LLM, num_tokens: int) -> Iterator[int]:
    """Experts that forwards over as many tokens in a row of the model's own texts wake."""
    params = SamplingParams(max_tokens=48, temperature=1.0, seed=1, ignore_eos=True)
    prompts = [{"prompt_token_ids": [5 + row, 9, 44]} for row in range(6)]
    outputs = llm.generate(prompts, params, num_speculative_tokens=0)
    woken = Woken(llm.model._model)
    for output in outputs:
        text, session = output.outputs[0].token_ids, Session(llm.model)
        for at in range(0, len(text) - num_tokens + 1, num_tokens):
            session.run({"a": text[at : at + num_tokens]})
            yield woken.take(num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
def test_measuring_wakes_as_many_experts_as_work_does(
    llm: LLM, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = float(np.mean(list(experts_at_work(llm, num_tokens))))
    _, woken = measured(llm, monkeypatch, per_expert=0.1)
    # Random ids are somewhat more varied than text, so the start errs towards short drafts; live timings mend that.
    assert 0.9 * at_work <= float(np.mean(woken.by_tokens[num_tokens])) <= 1.3 * at_work


def test_power_one_token_repeated_would_wake_too_few(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work = float(np.mean(list(experts_at_work(llm, 8))))
    bench = calibration._bench

    def repeated(*arguments: Any) -> calibration.Bench:
        found = bench(*arguments)
        return calibration.Bench([[7] * len(text) for text in found.texts], found.context, found.tables)

    monkeypatch.setattr(calibration, "_bench", repeated)
    _, woken = measured(llm, monkeypatch, per_expert=0.1)
    assert float(np.mean(woken.by_tokens[8])) < 0.8 * at_work


def test_lengths_shrink_where_more_tokens_wake_more_experts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    reach = np.full((1, GAMMA), 0.6).cumprod(-1)
    free = [np.zeros(2) for _ in range(GAMMA + 1)]
    lengths = []
    for per_expert in (0.0, 0.1, 1.0):
        costs, _ = measured(llm, monkeypatch, per_expert=per_expert)
        lengths += best_lengths(reach, free, costs.step_table(1 + GAMMA)[1:])
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == GAMMA
    assert lengths[-1] <= 2
