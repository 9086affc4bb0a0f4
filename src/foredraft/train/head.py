"""The frozen head in training: log-normalisers and the few logits that a loss looks at, never all of them at once.

A step's logits over the draft vocabulary would be tens of megabytes, read and written a dozen times by automatic
differentiation. Here a few hundred slots at a time pass through the cache, once forward and once backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 128
"""Slots at a time."""


@dataclass(frozen=True)
class HeadScores:
    """What is known of the logits of N slots; all but `top_columns` can be differentiated.

    Args:
        totals: [N], log-sum-exp of the logits.
        at: [N, M], logits of the columns asked for.
        top_columns, top: [N, K], the largest logits, best first.
    """

    totals: Tensor
    at: Tensor
    top_columns: Tensor
    top: Tensor


def head_scores(hidden: Tensor, head: Tensor, columns: Tensor, num_top: int) -> HeadScores:
    """Scores slots `hidden` [N, d] by `head` [C, d] at `columns` [N, M] and at each slot's `num_top` best."""
    totals, at, top_columns, top = _Head.apply(hidden, head, columns, num_top)  # type: ignore[no-untyped-call]
    return HeadScores(totals, at, top_columns, top)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, columns: Tensor, num_top: int) -> tuple[Tensor, ...]:
        parts: list[tuple[Tensor, ...]] = []
        ctx.logits = []
        for rows, wanted in zip(torch.split(hidden, CHUNK), torch.split(columns, CHUNK), strict=True):
            ctx.logits.append(rows.to(head.dtype) @ head.T)  # [n, C]
            logits = ctx.logits[-1].float()
            best = logits.topk(num_top, dim=-1)
            parts.append((logits.logsumexp(-1), logits.gather(-1, wanted), best.indices, best.values))
        totals, at, top_columns, top = (torch.cat(part) for part in zip(*parts, strict=True))
        ctx.save_for_backward(head, columns, totals, top_columns)
        ctx.dtype = hidden.dtype
        ctx.mark_non_differentiable(top_columns)
        return totals, at, top_columns, top

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        head, columns, totals, top_columns = ctx.saved_tensors
        for_totals, for_at, _, for_top = gradients
        parts = []
        for index, logits in enumerate(ctx.logits):
            part = slice(index * CHUNK, (index + 1) * CHUNK)
            each = logits.float().sub_(totals[part, None]).exp_().mul_(for_totals[part, None])
            each.scatter_add_(-1, columns[part], for_at[part])
            each.scatter_add_(-1, top_columns[part], for_top[part])
            parts.append((each.to(head.dtype) @ head).to(ctx.dtype))
        return torch.cat(parts), None, None, None
