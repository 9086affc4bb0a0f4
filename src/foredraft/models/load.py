"""From what a user names as a model to a model, its tokenizer and the ids that end its texts.

A name is `demo`, a `.gguf` file, a directory, or a hub id, which is looked up in the local cache before the
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from foredraft.config import DEMO, EngineConfig, require
from foredraft.errors import ConfigError, ModelError
from foredraft.models.config import FAMILIES, ModelConfig, read_model_config, token_ids
from foredraft.models.decoder import TargetModel
from foredraft.models.demo import demo_path
from foredraft.models.gguf import open_gguf
from foredraft.models.gguf_file import GGUFFile
from foredraft.models.gguf_tokenizer import tokenizer_from_gguf
from foredraft.models.hf import load_hf_model
from foredraft.models.tokenizer import Tokenizer, tokenizer_from_directory
from foredraft.models.weights import Progress, Weights, build_decoder, open_weights, read_json

DOWNLOADED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
"""Files fetched for a hub id; no pickles, no code."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with what belongs to it.

    Args:
        path: the directory or file that it came from.
        tokenizer: None when it was not wanted; holds the chat template.
        eos_token_ids: ids that end a text, from the config, the generation config and the tokenizer.
    """

    model: TargetModel
    tokenizer: Tokenizer | None
    path: Path
    eos_token_ids: tuple[int, ...]

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """Jinja source, or several by name; None when the model has none or was loaded without tokenizer."""
        return self.tokenizer.chat_template if self.tokenizer is not None else None


def load_model(
    config: EngineConfig,
    *,
    path: str | None = None,
    progress: Progress | None = None,
) -> LoadedModel:
    """Loads the target that `config` names, with its tokenizer unless `skip_tokenizer_init` is set.

    Args:
        path: another model, such as a draft model, in the same dtype on the same device. Its tokenizer is its
            own and its context is not shortened to `max_model_len`.
        progress: called with tensors read and tensors in all, once loading has taken two seconds.

    Raises:
        ModelError: the model cannot be found, read or run; says what, where and what to do.
        ConfigError: a device that is not there, or a `max_model_len` beyond the model's own.
    """
    is_target = path is None
    device, dtype = resolve_device(config.device), getattr(torch, config.dtype)
    found = find_model(config.model if path is None else path)
    gguf_file = GGUFFile(found) if found.is_file() else None
    tokenizer = None
    if not config.skip_tokenizer_init:
        name = config.tokenizer if is_target else None
        tokenizer = _tokenizer(found, gguf_file, name, config.trust_remote_code)
    max_model_len = config.max_model_len if is_target else None

    raw: dict[str, Any] = {}
    weights = None
    if gguf_file is not None:
        model_config, weights = open_gguf(gguf_file)
    else:
        raw = _read_config(found)
        if _is_native(raw, found):
            model_config, weights = read_model_config(raw, str(found / "config.json")), open_weights(found)
    model: TargetModel
    if weights is not None:
        model_config = _finish(model_config, found, tokenizer, max_model_len)
        model = build_decoder(model_config, weights, dtype=dtype, device=device, progress=progress)
    else:
        loaded = load_hf_model(found, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code)
        loaded.config = _finish(loaded.config, found, tokenizer, max_model_len)
        model = loaded
    return LoadedModel(model, tokenizer, found, model.config.eos_token_ids)


def open_model_weights(model: str) -> Weights:
    """The checkpoint that a name means, to read single tensors from under their Hugging Face names.

    Raises `ModelError` as `load_model` does, and for architectures that only transformers runs.
    """
    found = find_model(model)
    if found.is_file():
        return open_gguf(GGUFFile(found))[1]
    if not _is_native(_read_config(found), found):
        raise ModelError(f"{model}: its layers are not the decoder's own, so they cannot be read one by one")
    return open_weights(found)


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one; `ConfigError` when the device named is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        require(
            (chosen.index or 0) < count,
            f"device: {device} was asked for, but torch sees {count} CUDA devices; use --device cpu",
        )
    return chosen


def find_model(model: str) -> Path:
    """The directory or `.gguf` file that a name means.

    Raises:
        ModelError: there is no such directory or file, or the hub id is neither cached nor to be had.
    """
    if model == DEMO:
        return demo_path()
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{model}: no such file")
        return path
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"{model}: a file, but not .gguf; name the directory that holds config.json and the weights")
    parts = model.split("/")
    if path.is_absolute() or model.startswith((".", "~")) or len(parts) > 2 or not all(parts):
        raise ModelError(f"{model}: no such directory")
    return _from_hub(model)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception:  # not cached; huggingface_hub has several errors for that
        pass
    try:
        return Path(snapshot_download(model, allow_patterns=list(DOWNLOADED), etag_timeout=5))
    except Exception as error:  # offline, unknown, gated: the reason is in the error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model}: no such directory, not in the local Hugging Face cache, and downloading it failed "
            f"({reason}). Download it where there is a network (hf download), or give a directory, a "
            ".gguf file or demo"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        other = next(iter(sorted(path.glob("*.gguf"))), None)
        hint = f"; to load {other.name}, name that file" if other else "; is it a model's directory?"
        raise ModelError(f"{path}: config.json is missing{hint}")
    return read_json(path / "config.json")


def _is_native(raw: Mapping[str, Any], path: Path) -> bool:
    """Whether the decoder runs this model; otherwise transformers must, and `ModelError` when it cannot."""
    kind = raw.get("model_type")
    architectures = raw.get("architectures") or []
    name = str(architectures[0]) if architectures else ""
    if kind in FAMILIES:
        if "For" in name and not name.endswith("ForCausalLM"):
            raise ModelError(f"{path}: {name} is not a causal language model")
        method = (raw.get("quantization_config") or {}).get("quant_method")
        if method:
            raise ModelError(
                f"{path}: weights quantised with {method!r} are not supported; use the unquantised model or "
                "a .gguf file"
            )
        return True
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "AutoModelForCausalLM" not in (raw.get("auto_map") or {}):
        raise ModelError(
            f"{path}: unknown architecture (model_type {kind!r}{', ' + name if name else ''}); foredraft "
            f"runs {', '.join(FAMILIES)} itself, and through transformers every causal language model that "
            "it knows"
        )
    return False


def _finish(config: ModelConfig, path: Path, tokenizer: Tokenizer | None, max_model_len: int | None) -> ModelConfig:
    """Adds the end-of-text ids that other files name, and shortens the context when asked to."""
    if max_model_len is not None and max_model_len > config.max_model_len:
        raise ConfigError(f"max_model_len: {max_model_len} is beyond the model's own {config.max_model_len} tokens")
    ids = list(config.eos_token_ids)
    generation = path / "generation_config.json"
    if generation.is_file():
        ids += token_ids(read_json(generation).get("eos_token_id"), "eos_token_id", str(generation))
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(ids)), max_model_len=max_model_len or config.max_model_len)


def _tokenizer(path: Path, gguf_file: GGUFFile | None, name: str | None, trust_remote_code: bool) -> Tokenizer:
    """The tokenizer that `name` means, or else the model's own."""
    if name is not None:
        path = find_model(name)
        gguf_file = GGUFFile(path) if path.is_file() else None
    if gguf_file is not None:
        return tokenizer_from_gguf(gguf_file)
    return tokenizer_from_directory(path, trust_remote_code=trust_remote_code)
