"""Builds the target's `ForwardBatch` of a step: each request's pending tokens, then its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from foredraft.engine.scheduler import Scheduled
from foredraft.models.batch import ForwardBatch, ragged_batch


def build_batch(
    plan: Sequence[Scheduled],
    drafts: Sequence[Sequence[int]],
    trees: Sequence[Sequence[int]] | None,
    block_size: int,
    device: torch.device,
) -> ForwardBatch:
    """The forward of one step.

    Args:
        plan: scheduled requests.
        drafts: draft tokens of each, already cut; empty for requests that do not draft.
        trees: the parents of each one's draft nodes, when drafts are trees.
    Logits are asked for as `Scheduled.num_logits` says: mostly at the last pending token and at the drafts.
    """
    starts = [part.request.num_computed_tokens for part in plan]
    tokens = [
        [*part.request.token_ids[start : start + part.num_tokens], *draft]
        for part, start, draft in zip(plan, starts, drafts, strict=True)
    ]
    num_logits = [part.num_logits(len(draft)) for part, draft in zip(plan, drafts, strict=True)]
    tables = [part.request.block_table for part in plan]
    return ragged_batch(tokens, starts, tables, num_logits, block_size=block_size, device=device, trees=trees)
