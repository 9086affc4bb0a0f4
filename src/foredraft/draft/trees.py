"""Shapes of draft trees, as plain lists; node indices count from 0, and -1 is the anchor.

Parents come before their children, so a node's depth and path follow in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.draft.proposal import DraftTree


def comb(depth: int, width: int) -> list[int]:
    """Parents of a comb: a path of `depth` nodes, each with `width - 1` siblings that have no children.

    A chain is the comb of width 1. Nodes of one depth follow each other, the path's first.
    """
    parents: list[int] = []
    spine = -1
    for _ in range(depth):
        first = len(parents)
        parents += [spine] * width
        spine = first
    return parents


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 1 for children of the anchor."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """Which nodes each node sees, itself included, [n, n] bool."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def padded_tree(parents: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> DraftTree:
    """Trees of several requests as tensors; padding hangs below the anchor."""
    width = max((len(each) for each in parents), default=0)
    shape = (len(parents), width)
    rows = [[*each, *[-1] * (width - len(each))] for each in parents]
    depths = [[*depths_of(each), *[1] * (width - len(each))] for each in parents]
    return DraftTree(
        torch.tensor(rows, dtype=torch.int64, device=device).reshape(shape),
        torch.tensor(depths, dtype=torch.int64, device=device).reshape(shape),
    )
