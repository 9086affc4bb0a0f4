"""Attention over the paged KV cache behind one interface."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.kv.cache import KVCache
from foredraft.models.batch import ForwardBatch


class Attention(Protocol):
    """Stores the queries' keys and values, then attends to everything that each query may see."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        """`q` [T, Hq, D], `k` and `v` [T, Hkv, D] to [T, Hq·D]."""
        ...


class TorchAttention:
    """Gathers each request's keys and values and calls `scaled_dot_product_attention`; runs everywhere."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        cache.write(layer, batch.slot_mapping, k, v)
        out = torch.empty_like(q)
        bounds, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
        for request, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            keys, values = self._gathered(layer, batch.block_tables[request], seq_lens[request], cache)  # [Hkv, S, D]
            mask = visible(batch, begin, end, seq_lens[request], sliding_window)  # [n, S]
            query = q[begin:end].transpose(0, 1)[None]
            mixed = F.scaled_dot_product_attention(
                query,
                keys[None].to(q.dtype),
                values[None].to(q.dtype),
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            out[begin:end] = mixed[0].transpose(0, 1)
        return out.reshape(q.shape[0], -1)

    @staticmethod
    def _gathered(layer: int, table: Tensor, length: int, cache: KVCache) -> tuple[Tensor, Tensor]:
        blocks = table[: -(-length // cache.block_size)]
        keys, values = cache.keys(layer)[blocks], cache.values(layer)[blocks]  # [n, Hkv, block, D]
        return tuple(part.transpose(0, 1).flatten(1, 2)[:, :length] for part in (keys, values))  # type: ignore[return-value]


def visible(batch: ForwardBatch, begin: int, end: int, length: int, sliding_window: int | None) -> Tensor:
    """Which of `length` cached tokens each of the query tokens `begin`..`end` sees, [n, length] bool."""
    count, positions = end - begin, batch.positions[begin:end]
    prefix = length - count
    key_positions = torch.arange(length, device=positions.device)
    key_positions[prefix:] = positions
    if batch.tree_mask is None:
        mask = key_positions[None] <= positions[:, None]
    else:
        mask = torch.ones(count, length, dtype=torch.bool, device=positions.device)
        mask[:, prefix:] = batch.tree_mask[begin:end, :count]
    if sliding_window is not None:
        mask &= positions[:, None] - key_positions[None] < sliding_window
    return mask


def make_attention(device: torch.device, dtype: torch.dtype) -> Attention:
    """The attention that runs fastest on `device`."""
    return TorchAttention()
