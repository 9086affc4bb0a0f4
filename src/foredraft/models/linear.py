"""Linear layers behind one interface, one implementation per device and weight format."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F


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
    """`F.linear` on an ordinary weight."""

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


def pack_linear(
    weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, device: torch.device, invariant: bool = False
) -> Linear:
    """A linear layer in the format that runs fastest on `device`."""
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    return DenseLinear(weight.to(device=device, dtype=dtype), bias)
