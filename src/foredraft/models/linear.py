"""Linear layers behind one interface, one implementation per device and weight format."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.models import arena, native


class Linear(Protocol):
    """y = x Wᵀ + bias (+ residual)."""

    in_features: int
    out_features: int
    nbytes: int

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x` [M, in_features] to [M, out_features] in the dtype of `x`."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` [n] of the weight [n, in_features]: the embedding of a model whose head is tied to it."""
        ...


class DenseLinear:
    """`F.linear` on an ordinary weight: CUDA, and CPUs without our kernels."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x.to(self._weight.dtype), self._weight, self._bias).to(x.dtype)
        return y if residual is None else y + residual

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self._weight)


class NativeLinear:
    """Our CPU kernels: weights packed in panels, the same bits for a row in any company.

    They read the weights at the memory's speed and hide 8 rows' arithmetic behind it, up to 16 rows' where there is a
    tile unit (AMX, bfloat16 weights). Activations are float32, rounded to bfloat16 on the way into a tile. oneDNN has
    no bfloat16 path at all before AVX-512, and takes longer for a row where it has one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        library, suffix = native.library(), native.SUFFIX[weight.dtype]
        packed_size = library.fd_packed_size
        if weight.dtype is torch.bfloat16 and native.has_amx():
            suffix, packed_size = native.AMX, library.fd_packed_size_amx
        self.out_features, self.in_features = weight.shape
        weight = weight.contiguous()
        size = packed_size(self.out_features, self.in_features)
        self._packed = arena.weights.empty(size, weight.dtype)
        pack = getattr(library, f"fd_pack_{suffix}")
        pack(weight.data_ptr(), self._packed.data_ptr(), self.out_features, self.in_features)
        self._bias = None if bias is None else bias.float().contiguous()
        self.nbytes = self._packed.nbytes + (self._bias.nbytes if self._bias is not None else 0)
        self._pointer = self._packed.data_ptr()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._gemm = getattr(library, f"fd_gemm_{suffix}")
        self.struct = native.MatrixStruct(
            self._pointer, self._bias_pointer, native.address(f"fd_gemm_{suffix}"), self.out_features, self.in_features
        )
        self._gather = getattr(library, f"fd_rows_{suffix}")

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows = x.shape[0]
        y = torch.empty(num_rows, self.out_features)
        self._gemm(
            self._pointer,
            self._bias_pointer,
            x.data_ptr(),
            x.stride(0),
            None if residual is None else residual.data_ptr(),
            y.data_ptr(),
            num_rows,
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )
        return y

    def rows(self, ids: Tensor) -> Tensor:
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.in_features)
        self._gather(self._pointer, ids.data_ptr(), out.data_ptr(), len(ids), self.in_features)
        return out


def pack_linear(weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device) -> Linear:
    """A linear layer of `weight` [out, in] in the format that runs fastest on `device`."""
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    weight = weight.to(device=device, dtype=dtype)
    if device.type == "cpu" and dtype in native.SUFFIX and native.available():
        return NativeLinear(weight, bias)
    return DenseLinear(weight, bias)
