"""What the engine needs to know about a model, and how it is read from a `config.json`.

The decoder's families differ only in what `FAMILIES` says. Values that a file leaves out take transformers'
defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foredraft.errors import ModelError
from foredraft.models.rope import RopeConfig, rope_from_hf


@dataclass(frozen=True)
class ModelConfig:
    """A model's sizes and kinds, in the names of this project.

    Args:
        architecture: transformers' `model_type`.
        max_model_len: longest sequence in tokens.
        sliding_windows: per layer, how many tokens a token attends to (itself included); None is all.
        rope: None for models that run in transformers (`models.hf`).
        qkv_bias, output_bias, mlp_bias: which linear layers have a bias; output is attention's last one.
        qk_norm: whether queries and keys are normalised per head.
        eos_token_ids: ids that end a text; more can come from the generation config and the tokenizer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    intermediate_size: int = 0
    rms_norm_eps: float = 1e-6
    sliding_windows: tuple[int | None, ...] = ()
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


@dataclass(frozen=True)
class Family:
    """How one `model_type` differs from Llama.

    Args:
        defaults: transformers' values for keys that a config may leave out.
        qkv_bias: fixed by the family, or None when `attention_bias` says so (and then for the output layer
            too).
        window: `none`, `all` layers slide, or `layers` say so themselves (`layer_types`).
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    qkv_bias: bool | None = None
    qk_norm: bool = False
    mlp_bias: bool = False
    window: str = "none"


_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "max_window_layers": 28,
    "sliding_window": 4096,
}
FAMILIES: dict[str, Family] = {
    "llama": Family({"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}, mlp_bias=True),
    "mistral": Family(
        {
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        qkv_bias=False,
        window="all",
    ),
    "qwen2": Family(_QWEN, qkv_bias=True, window="layers"),
    "qwen3": Family({**_QWEN, "head_dim": 128}, qk_norm=True, window="layers"),
}


def read_model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The configuration of a model of one of `FAMILIES`.

    Args:
        raw: the content of a `config.json`.
        where: the file, for messages.

    Raises:
        ModelError: a missing or impossible value, naming the key.
    """
    architecture = raw.get("model_type")
    family = FAMILIES[str(architecture)]
    values = {**family.defaults, **raw}
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {values['hidden_act']!r} is not supported; {architecture} uses silu")

    hidden_size = positive(values, "hidden_size", where)
    num_heads = positive(values, "num_attention_heads", where)
    num_layers = positive(values, "num_hidden_layers", where)
    num_kv_heads = num_heads
    if values.get("num_key_value_heads") is not None:
        num_kv_heads = positive(values, "num_key_value_heads", where)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"{where}: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if values.get("head_dim") is not None:
        head_dim = positive(values, "head_dim", where)
    elif hidden_size % num_heads:
        raise ModelError(
            f"{where}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}, "
            "and there is no head_dim"
        )
    else:
        head_dim = hidden_size // num_heads
    max_position = positive(values, "max_position_embeddings", where)
    rope = rope_from_hf(values, head_dim=head_dim, max_position=max_position, where=where)
    attention_bias = bool(values.get("attention_bias", False))
    return ModelConfig(
        architecture=str(architecture),
        vocab_size=positive(values, "vocab_size", where),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=rope.max_model_len,
        intermediate_size=positive(values, "intermediate_size", where),
        rms_norm_eps=_epsilon(values, where),
        sliding_windows=_sliding_windows(values, family, num_layers, where),
        rope=rope,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.qkv_bias is None else False,
        mlp_bias=family.mlp_bias and bool(values.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_token_ids=token_ids(values.get("eos_token_id"), "eos_token_id", where),
        bos_token_id=next(iter(token_ids(values.get("bos_token_id"), "bos_token_id", where)), None),
    )


def positive(raw: Mapping[str, Any], key: str, where: str) -> int:
    """`raw[key]` as an integer of at least 1; `ModelError` naming the key otherwise."""
    if key not in raw:
        raise ModelError(f"{where}: {key} is missing")
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{where}: {key} is {value!r}, not a positive integer")
    return value


def token_ids(value: object, key: str, where: str) -> tuple[int, ...]:
    """One token id, a list of them or null, as a tuple."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        raise ModelError(f"{where}: {key} is {value!r}, not a token id or a list of them")
    return tuple(ids)


def _epsilon(raw: Mapping[str, Any], where: str) -> float:
    value = raw.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ModelError(f"{where}: rms_norm_eps is {value!r}, not a number of at least 0")
    return float(value)


def _sliding_windows(raw: Mapping[str, Any], family: Family, num_layers: int, where: str) -> tuple[int | None, ...]:
    """Per layer, the window in tokens or None; Qwen says it per layer and behind a switch."""
    off = family.window == "none" or (family.window == "layers" and not raw.get("use_sliding_window", False))
    if off or not raw.get("sliding_window"):
        return (None,) * num_layers
    window = positive(raw, "sliding_window", where)
    if family.window == "all":
        return (window,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw["max_window_layers"]
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown or len(kinds) != num_layers:
        raise ModelError(
            f"{where}: layer_types has {len(kinds)} entries of {sorted(set(kinds))}; {num_layers} of "
            "full_attention or sliding_attention are needed"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
