"""`ForwardBatch`: which tokens of which requests one forward computes, and where their keys and values go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of B ragged requests.

    Args:
        input_ids: [T] int64.
        positions: [T] int64, in the request's text.
        slot_mapping: [T] int64, cache slots of the tokens' keys and values; -1 stores nothing.
        query_start_loc: [B+1] int64, each request's range of tokens.
        seq_lens: [B] int64, each request's tokens in the cache after this forward.
        block_tables: [B, max_blocks] int64, padded with 0.
        logits_indices: [N] int64, tokens whose logits are wanted.
        tree_mask: [T, W] bool, W the longest query: whether a token sees token j of its own query. None is causal. What
            was in the cache before is always visible.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    tree_mask: Tensor | None = None


def ragged_batch(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    num_logits: Sequence[int],
    *,
    block_size: int,
    device: torch.device,
    trees: Sequence[Sequence[int] | None] | None = None,
) -> ForwardBatch:
    """A forward of several requests, causal unless `trees` says otherwise.

    Args:
        tokens: each request's query tokens, at least one.
        starts: position of each request's first query token; what is before it is in the cache.
        block_tables: each request's blocks, covering its query.
        num_logits: how many of each request's last query tokens want logits.
        trees: for each request None, or the parents of its last tokens: a tree whose root is the token before them.
            Parents count from the tree's first token; -1 is the root. Keys and values lie in the order given, whatever
            the tree's shape.
    """
    counts = np.array([len(ids) for ids in tokens], dtype=np.int64)
    first = np.array(starts, dtype=np.int64)
    bounds = np.zeros(len(tokens) + 1, dtype=np.int64)
    np.cumsum(counts, out=bounds[1:])
    rows = np.repeat(np.arange(len(tokens)), counts)  # [T], the request of each token
    positions = np.arange(bounds[-1]) + np.repeat(first - bounds[:-1], counts)  # [T]
    tables = padded_block_tables(block_tables)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    flat = np.fromiter((token for ids in tokens for token in ids), dtype=np.int64, count=int(bounds[-1]))
    ends = zip(bounds[1:].tolist(), num_logits, strict=True)
    wanted = np.array([row for end, count in ends for row in range(end - count, end)], dtype=np.int64)
    mask = None
    if trees is not None and any(trees):
        mask = torch.from_numpy(_tree_mask(counts, bounds, positions, trees)).to(device)
    on_device = [
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (flat, positions, slots, bounds, first + counts, tables, wanted)
    ]
    input_ids, places, slot_mapping, query_start_loc, seq_lens, padded, logits_indices = on_device
    return ForwardBatch(
        input_ids, places, slot_mapping, query_start_loc, seq_lens, padded, logits_indices, tree_mask=mask
    )


def _tree_mask(
    counts: np.ndarray, bounds: np.ndarray, positions: np.ndarray, trees: Sequence[Sequence[int] | None]
) -> np.ndarray:
    """What each token sees of its own query [T, longest query]; moves the `positions` of tree nodes to their depths."""
    widest = int(counts.max())
    mask = np.zeros((int(bounds[-1]), widest), dtype=np.bool_)
    for begin, count, parents in zip(bounds[:-1].tolist(), counts.tolist(), trees, strict=True):
        mask[begin : begin + count, :count] = np.tri(count, dtype=np.bool_)
        if not parents:
            continue
        root = begin + count - len(parents) - 1
        for node, parent in enumerate(parents):
            row, above = root + 1 + node, root + 1 + parent
            mask[row, :count] = mask[above, :count]
            mask[row, row - begin] = True
            positions[row] = positions[above] + 1
    return mask


def padded_block_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Block tables as one array [B, longest] int64, padded with 0."""
    padded = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
