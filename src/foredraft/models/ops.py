"""Small operations between the linear layers: our kernels for float32 on the CPU, torch elsewhere.

Like all our kernels they give a row the same bits in any company.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.models import native


def _is_native(x: Tensor) -> bool:
    return native.available() and x.dtype is torch.float32 and x.device.type == "cpu"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension of `x` [T, d] or [T, H, D]."""
    if _is_native(x) and x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == x.shape[2]):
        y = torch.empty(x.shape)
        heads = x.shape[1] if x.dim() == 3 else 1
        native.library().fd_rms_norm(
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            heads,
            x.shape[-1],
            eps,
            torch.get_num_threads(),
        )
        return y
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype)).to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 I], gate first, as [T, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if _is_native(gate_up) and gate_up.is_contiguous():
        y = torch.empty(num_rows, width)
        threads = torch.get_num_threads()
        native.library().fd_silu_mul(gate_up.data_ptr(), y.data_ptr(), num_rows, width, threads)
        return y
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first 2·R of each head's dimensions, halves paired, by `cos` and `sin` [T, R]; may write in place."""
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    if _is_native(x) and x.stride(2) == 1 and x.stride(1) == x.shape[2] and cos.is_contiguous():
        num_rows, heads, size = x.shape
        native.library().fd_rope(x.data_ptr(), x.stride(0), cos.data_ptr(), sin.data_ptr(), num_rows, heads, size, half)
        return x
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
