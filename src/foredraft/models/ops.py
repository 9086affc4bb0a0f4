"""Small operations between the linear layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * y.to(x.dtype)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 I], gate first, as [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first 2·R of each head's dimensions, halves paired, by `cos` and `sin` [T, R]."""
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
