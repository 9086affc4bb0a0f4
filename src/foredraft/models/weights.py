"""Checkpoints: where tensors lie, whether they fit the configuration, and how they become a `Decoder`.

Tensors are read one at a time and packed at once, so that loading needs the weights plus the largest matrix.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ModelError
from foredraft.models.config import ModelConfig
from foredraft.models.decoder import Decoder, DecoderLayer
from foredraft.models.linear import Linear, pack_linear

Progress = Callable[[int, int], None]
"""Called with tensors read and tensors in all, at most ten times a second, two seconds into a load."""

HARMLESS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "masked_bias")
"""Endings of tensors that old checkpoints carry and no decoder needs."""

FLOAT_NAMES = ("F64", "F32", "F16", "BF16")
"""Safetensors' names of the element types that weights can have."""


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors under transformers' names.

    Args:
        where: the file or directory, for messages.
        shapes: of every tensor.
        fill: copies the named tensor into one of its shape, converting to that one's dtype.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    fill: Callable[[str, Tensor], None]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """One tensor in `dtype`, in memory of its own."""
        tensor = torch.empty(self.shapes[name], dtype=dtype)
        self.fill(name, tensor)
        return tensor


def open_weights(directory: Path) -> Weights:
    """Opens a directory's checkpoint: safetensors, in one file or several, or else a pickle of tensors.

    Raises:
        ModelError: no checkpoint, a missing shard, or an unreadable or truncated file.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _open_safetensors(directory, _shards(index))
    single = directory / "model.safetensors"
    if single.is_file():
        return _open_safetensors(directory, [single])
    index = directory / "pytorch_model.bin.index.json"
    if index.is_file():
        return _open_pickles(directory, _shards(index))
    for name in ("pytorch_model.bin", "model.pt"):
        if (directory / name).is_file():
            return _open_pickles(directory, [directory / name])
    found = sorted(directory.glob("*.safetensors"))
    if found:
        return _open_safetensors(directory, found)
    raise ModelError(
        f"{directory}: no weights; expected model.safetensors, model.safetensors.index.json with its shards, "
        "or pytorch_model.bin"
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; `ModelError` naming the file and line when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not a JSON object")
    return value


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a decoder of `config` needs, without the head of a tied one."""
    d, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, d)}
    for i in range(config.num_layers):
        at = f"model.layers.{i}."
        shapes[at + "input_layernorm.weight"] = (d,)
        shapes[at + "post_attention_layernorm.weight"] = (d,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[at + f"self_attn.{name}_proj.weight"] = (rows, d)
            if config.qkv_bias:
                shapes[at + f"self_attn.{name}_proj.bias"] = (rows,)
        shapes[at + "self_attn.o_proj.weight"] = (d, q)
        if config.output_bias:
            shapes[at + "self_attn.o_proj.bias"] = (d,)
        if config.qk_norm:
            shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (head_dim,)
        for name, shape in (
            ("gate", (intermediate, d)),
            ("up", (intermediate, d)),
            ("down", (d, intermediate)),
        ):
            shapes[at + f"mlp.{name}_proj.weight"] = shape
            if config.mlp_bias:
                shapes[at + f"mlp.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (d,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, d)
    return shapes


def check_weights(weights: Weights, config: ModelConfig) -> None:
    """Raises `ModelError` naming tensors that are missing, surplus or of another shape than `config` says."""
    expected = expected_shapes(config)
    found = {name: shape for name, shape in weights.shapes.items() if not name.endswith(HARMLESS)}
    wrong = [
        f"{name} has shape {list(found[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]
    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected and name != "lm_head.weight"]
    for problem, names in (
        ("wrong shapes", wrong),
        ("missing tensors", missing),
        ("unknown tensors", surplus),
    ):
        if names:
            raise ModelError(
                f"{weights.where}: {problem}: {_some(names)}. The weights do not fit the configuration of a "
                f"{config.architecture} model; check that both come from the same model"
            )


def build_decoder(
    config: ModelConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Decoder:
    """Reads, checks and packs a decoder's weights.

    Raises:
        ModelError: tensors missing, surplus, of a wrong shape or not of floating point, or an unreadable file.
    """
    weights = _with_prefix(weights)
    check_weights(weights, config)
    expected = expected_shapes(config)
    report = _Reporter(len(expected), progress)

    def joined(names: Sequence[str], suffix: str) -> Tensor:
        """Tensors one below the other, each read to its place."""
        rows = [weights.shapes[name + suffix][0] for name in names]
        tensor = torch.empty(sum(rows), *weights.shapes[names[0] + suffix][1:], dtype=dtype)
        for name, part in zip(names, torch.split(tensor, rows), strict=True):
            weights.fill(name + suffix, part)
            report.step()
        return tensor

    def linear(*names: str, bias: bool = False) -> Linear:
        offsets = joined(names, ".bias") if bias else None
        return pack_linear(joined(names, ".weight"), offsets, dtype=dtype, device=device)

    norm_dtype = torch.float32 if device.type == "cpu" else dtype
    norms = {
        name: joined([name], "").to(device=device, dtype=norm_dtype)
        for name in expected
        if name.endswith("norm.weight")
    }
    # The largest matrices first: what packing them takes besides is then no part of the peak.
    config = _settle_tie(config, weights)
    embedding = None if config.tie_word_embeddings else joined(["model.embed_tokens.weight"], "").to(device)
    head = linear("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
    layers = []
    for i in range(config.num_layers):
        attn, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        layers.append(
            DecoderLayer(
                input_norm=norms[f"model.layers.{i}.input_layernorm.weight"],
                qkv=linear(attn + "q_proj", attn + "k_proj", attn + "v_proj", bias=config.qkv_bias),
                q_norm=norms.get(attn + "q_norm.weight"),
                k_norm=norms.get(attn + "k_norm.weight"),
                output=linear(attn + "o_proj", bias=config.output_bias),
                post_norm=norms[f"model.layers.{i}.post_attention_layernorm.weight"],
                gate_up=linear(mlp + "gate_proj", mlp + "up_proj", bias=config.mlp_bias),
                down=linear(mlp + "down_proj", bias=config.mlp_bias),
                sliding_window=config.sliding_windows[i],
            )
        )
        _return_freed_memory()
    return Decoder(
        config,
        embedding=embedding,
        layers=layers,
        norm=norms["model.norm.weight"],
        head=head,
        dtype=dtype,
        device=device,
    )


def _settle_tie(config: ModelConfig, weights: Weights) -> ModelConfig:
    """A tied model whose checkpoint has another head of its own keeps that head, as in transformers."""
    if not config.tie_word_embeddings or "lm_head.weight" not in weights.shapes:
        return config
    head, embedding = (weights.read(name, torch.float32) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if torch.equal(head, embedding):
        return config
    return replace(config, tie_word_embeddings=False)


def _with_prefix(weights: Weights) -> Weights:
    """Checkpoints of a model saved without its head lack the prefix `model.` in every name."""
    if "embed_tokens.weight" not in weights.shapes:
        return weights
    names = {name if name == "lm_head.weight" else "model." + name: name for name in weights.shapes}
    shapes = {name: weights.shapes[original] for name, original in names.items()}
    return Weights(weights.where, shapes, lambda name, out: weights.fill(names[name], out))


def _shards(index: Path) -> list[Path]:
    """The files that a sharded checkpoint's index names, each once."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is missing or empty")
    paths = [index.parent / str(name) for name in sorted(set(map(str, weight_map.values())))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(f"{index}: shards are missing beside it: {_some(missing)}; download them again")
    return paths


def _open_safetensors(directory: Path, paths: list[Path]) -> Weights:
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, Path] = {}
    for path in paths:
        try:
            handle: Any = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"{path}: not readable as safetensors ({error}); the file is damaged or truncated: download it again"
            ) from error
        for name in handle.keys():  # noqa: SIM118 - a handle is no dict
            part = handle.get_slice(name)
            if part.get_dtype() not in FLOAT_NAMES and not name.endswith(HARMLESS):
                raise ModelError(
                    f"{path}: {name} is of type {part.get_dtype()}; weights of {', '.join(FLOAT_NAMES)} are "
                    "supported, and quantised ones as GGUF"
                )
            shapes[name] = tuple(part.get_shape())
            files[name] = path

    def fill(name: str, out: Tensor) -> None:
        # Opened for each tensor, so that the pages of a mapped file do not add up to a second copy in memory.
        with safe_open(files[name], framework="pt", device="cpu") as handle:
            out.copy_(handle.get_tensor(name))

    return Weights(str(directory), shapes, fill)


def _open_pickles(directory: Path, paths: list[Path]) -> Weights:
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises half a dozen unrelated types for damaged or unsafe files
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"{path}: not readable as a pickle of tensors ({reason}); it is damaged, or holds more than weights"
            ) from error
        state = state.get("state_dict", state) if isinstance(state, dict) else {}
        tensors.update({str(name): value for name, value in state.items() if isinstance(value, Tensor)})
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    odd = [n for n, value in tensors.items() if not value.is_floating_point() and not n.endswith(HARMLESS)]
    if odd:
        raise ModelError(f"{directory}: tensors that are not of floating point: {_some(odd)}")

    def fill(name: str, out: Tensor) -> None:
        out.copy_(tensors[name])

    return Weights(str(directory), shapes, fill)


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _return_freed_memory() -> None:
    """Lets go of what large temporary tensors left in glibc's heap: small ones between them keep it from being reused,
    and a load would end at a fifth more than its weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


class _Reporter:
    """Calls `progress` while a long load runs."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.progress, self.done = total, progress, 0
        self.next_report = time.monotonic() + 2.0
        self.reported = False

    def step(self) -> None:
        self.done += 1
        if self.progress is None:
            return
        now = time.monotonic()
        if now >= self.next_report or (self.reported and self.done == self.total):
            self.progress(self.done, self.total)
            self.next_report, self.reported = now + 0.1, True
