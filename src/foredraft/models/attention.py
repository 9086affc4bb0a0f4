"""Attention over the paged KV cache behind one interface."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.kv.cache import KVCache
from foredraft.models import native
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
            keys, values = gathered(layer, batch.block_tables[request], seq_lens[request], cache)  # [Hkv, S, D]
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


class NativeAttention:
    """Our CPU kernel: reads the paged cache where it lies.

    A query's bits depend on itself and on the keys and values that it sees, in their order; so does a tree's branch,
    which equals the chain of its nodes.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._run = getattr(native.library(), f"fd_attention_{native.SUFFIX[dtype]}")
        self._batch: ForwardBatch | None = None
        self._struct = native.BatchStruct()

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
        struct = self.struct(batch, q.shape[1], k.shape[1], q.shape[2], cache.block_size)
        struct.scale, struct.window = scale, sliding_window or 0
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        self._run(
            struct,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            cache.keys(layer).data_ptr(),
            cache.values(layer).data_ptr(),
            out.data_ptr(),
        )
        return out

    def struct(self, batch: ForwardBatch, heads: int, kv_heads: int, dim: int, block_size: int) -> native.BatchStruct:
        """The kernels' view of `batch`, filled once a forward, not once a layer."""
        if self._batch is not batch:
            self._batch = batch
            _fill(self._struct, batch)
            self._struct.heads, self._struct.kv_heads, self._struct.dim = heads, kv_heads, dim
            self._struct.block = block_size
        return self._struct


def _fill(struct: native.BatchStruct, batch: ForwardBatch) -> None:
    """Points `struct` at the tensors of `batch`, which must outlive its use."""
    struct.query_start = batch.query_start_loc.data_ptr()
    struct.seq_lens = batch.seq_lens.data_ptr()
    struct.tables = batch.block_tables.data_ptr()
    struct.positions = batch.positions.data_ptr()
    struct.slots = batch.slot_mapping.data_ptr()
    struct.table_stride = batch.block_tables.stride(0)
    struct.tree = None if batch.tree_mask is None else batch.tree_mask.data_ptr()
    struct.tree_stride = 0 if batch.tree_mask is None else batch.tree_mask.stride(0)
    struct.requests, struct.tokens = len(batch.seq_lens), len(batch.input_ids)
    struct.threads = torch.get_num_threads()


def gathered(layer: int, table: Tensor, length: int, cache: KVCache) -> tuple[Tensor, Tensor]:
    """A request's first `length` keys and values by its block table, each [Hkv, length, D]."""
    blocks = table[: -(-length // cache.block_size)]
    keys = cache.keys(layer)[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
    values = cache.values(layer)[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
    return keys, values


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
    """The attention that runs fastest on `device` over a cache of `dtype`."""
    if device.type == "cpu" and dtype in native.SUFFIX and native.available():
        return NativeAttention(dtype)
    return TorchAttention()
