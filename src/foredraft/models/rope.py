"""Rotary position embeddings: the kinds of scaling, and the tables that the decoder indexes by position.

Follows transformers' `modeling_rope_utils` to the rounding (float32 throughout), so that logits agree. One
kind is ambiguous there: `dynamic` (NTK) derives its base from the longest sequence of the current call, so
the same token gets another rotation in a prefill than in a decode. Here position p always takes the base of a
sequence of p + 1 tokens. That is what transformers computes token by token with its cache, it equals the
default kind up to the trained length, and it makes a cached key independent of how its prompt was cut into
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foredraft.errors import ModelError

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """One model's rotary embedding.

    Args:
        kind: one of `ROPE_KINDS`.
        theta: base of the wavelengths.
        rotary_dim: leading elements of each head that are rotated; even, at most `head_dim`.
        max_position: the trained context in tokens (`max_position_embeddings`).
        factor: by how much the context is stretched.
        original_max_position: context before stretching, for `llama3` and `yarn`.
        attention_factor: multiplies cos and sin (`yarn`).
        beta_fast, beta_slow, truncate: the ramp of `yarn`, in rotations over the original context.
        low_freq_factor, high_freq_factor: the ramp of `llama3`.
        divisors: per-frequency divisors [rotary_dim / 2] that replace `kind`'s own formula (GGUF's
            `rope_freqs`).
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position: int
    factor: float = 1.0
    original_max_position: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    divisors: tuple[float, ...] | None = None

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens that the scaling was made for."""
        if self.kind in ("linear", "dynamic"):
            return int(self.max_position * self.factor)
        if self.kind == "yarn":
            return max(self.max_position, int(self.original_max_position * self.factor))
        return self.max_position


def rope_from_hf(raw: Mapping[str, Any], *, head_dim: int, max_position: int, where: str) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older) of a `config.json`.

    Raises:
        ModelError: an unknown kind, a missing or non-numeric parameter, or a rotary size that is odd or too
            large.
    """
    params: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        given = raw.get(key)
        if given is not None and not isinstance(given, Mapping):
            raise ModelError(f"{where}: {key} is {given!r}, not an object")
        params.update(given or {})
    if any(isinstance(value, Mapping) for value in params.values()):
        raise ModelError(f"{where}: rope_parameters per layer type ({', '.join(params)}) are not supported")
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelError(f"{where}: rope_type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}")

    def number(key: str, fallback: float | None) -> float:
        value = params.get(key)
        value = fallback if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{where}: rope_type {kind!r} needs {key} as a positive number, got {value!r}")
        return value

    partial = number("partial_rotary_factor", raw.get("partial_rotary_factor") or 1.0)
    rotary_dim = int(head_dim * partial)
    least = 4 if kind == "dynamic" else 2
    if rotary_dim % 2 or not least <= rotary_dim <= head_dim:
        raise ModelError(
            f"{where}: {rotary_dim} rotated elements per head (head_dim {head_dim}, partial_rotary_factor "
            f"{partial}); an even number from {least} to head_dim is needed"
        )
    original = int(
        raw.get("original_max_position_embeddings") or number("original_max_position_embeddings", max_position)
    )
    factor = 1.0
    if kind != "default":
        factor = number("factor", max_position / original if kind == "yarn" else None)
    attention_factor = 1.0
    if kind == "yarn":
        scales = (params.get("mscale"), params.get("mscale_all_dim"))
        attention_factor = number("attention_factor", yarn_attention_factor(factor, *scales))
    return RopeConfig(
        kind=kind,
        theta=number("rope_theta", raw.get("rope_theta") or 10_000.0),
        rotary_dim=rotary_dim,
        max_position=max_position,
        factor=factor,
        original_max_position=original,
        attention_factor=attention_factor,
        beta_fast=params.get("beta_fast") or 32.0,
        beta_slow=params.get("beta_slow") or 1.0,
        truncate=bool(params.get("truncate", True)),
        low_freq_factor=number("low_freq_factor", None) if kind == "llama3" else 1.0,
        high_freq_factor=number("high_freq_factor", None) if kind == "llama3" else 4.0,
    )


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """The factor on cos and sin that YaRN prescribes for a context stretched by `factor`."""

    def scaled(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scaled(mscale) / scaled(mscale_all_dim)
    return scaled(1.0)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position, float32 [rotary_dim / 2]; for `dynamic`, up to the trained length."""
    dim = rope.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / (rope.theta**exponents)
    if rope.divisors is not None:
        return inverse / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "linear":
        return inverse / rope.factor
    if rope.kind == "llama3":
        return _llama3(inverse, rope)
    if rope.kind == "yarn":
        return _yarn(rope.theta**exponents, rope)
    return inverse


def rope_tables(rope: RopeConfig, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """cos and sin by position, each float32 [length, rotary_dim / 2], with the attention factor applied."""
    positions = torch.arange(length).float()  # [length]
    if rope.kind == "dynamic":
        angles = positions[:, None] * _dynamic(rope, length)
    else:
        angles = positions[:, None] * inverse_frequencies(rope)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(device), sin.to(device)


def _dynamic(rope: RopeConfig, length: int) -> Tensor:
    """Radians per position for each position's own sequence length, [length, rotary_dim / 2]."""
    dim = rope.rotary_dim
    seq_lens = torch.arange(1, length + 1).clamp(min=rope.max_position)
    stretch = (rope.factor * seq_lens / rope.max_position) - (rope.factor - 1)
    bases = rope.theta * stretch ** (dim / (dim - 2))  # [length]
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return 1.0 / (bases[:, None] ** exponents)


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths divided by the factor, short ones kept, a smooth ramp between."""
    original, low, high = rope.original_max_position, rope.low_freq_factor, rope.high_freq_factor
    wavelengths = 2 * math.pi / inverse
    smooth = (original / wavelengths - low) / (high - low)
    ramp = (1 - smooth) * inverse / rope.factor + smooth * inverse
    scaled = torch.where(wavelengths > original / low, inverse / rope.factor, inverse)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, ramp, scaled)


def _yarn(wavelengths: Tensor, rope: RopeConfig) -> Tensor:
    """YaRN: interpolated below `beta_slow` rotations over the original context, as is above `beta_fast`."""
    dim = rope.rotary_dim

    def correction(rotations: float) -> float:
        return dim * math.log(rope.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction(rope.beta_fast), correction(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated
