"""The K tokens of each slot that a corrector chooses among."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Candidates:
    """Token ids and unary logits of each slot's candidates, both [B, γ, K], best first.

    A token that came in twice keeps its score once; the other column has -inf.
    """

    token_ids: Tensor
    scores: Tensor


def top_candidates(
    unary_logits: Tensor, count: int, draft_ids: Tensor | None = None, preference: Tensor | None = None
) -> Candidates:
    """The `count` largest logits of each slot (fewer when the vocabulary is smaller).

    Args:
        unary_logits: [B, γ, C], over the draft vocabulary.
        draft_ids: [C] target ids of the columns; None when they are the target's own.
        preference: what to choose by in place of the logits, in their shape.
    """
    scores, columns = (unary_logits if preference is None else preference).topk(
        min(count, unary_logits.shape[-1]), dim=-1
    )
    if preference is not None:
        scores = unary_logits.gather(-1, columns)
    return Candidates(columns if draft_ids is None else draft_ids[columns], scores)


def with_extra(
    candidates: Candidates,
    token_ids: Tensor,
    present: Tensor,
    bias: Tensor | float,
    floor: Tensor | None = None,
) -> Candidates:
    """Adds tokens from elsewhere, such as an n-gram's continuation, as further states of the lattice.

    One that is already among the candidates adds its bias there. Others score the slot's lowest candidate
    plus the bias, or `floor` plus the bias: their unary logits, where they are known.

    Args:
        token_ids: [B, γ, M].
        present: [B, γ, M] bool, which of them exist.
        bias: what being proposed elsewhere is worth, broadcast to [B, γ, M].
        floor: [B, γ, M], unary logits.
    """
    base = candidates.scores.amin(-1, keepdim=True).expand(token_ids.shape) if floor is None else floor
    bias = torch.as_tensor(bias, dtype=base.dtype, device=base.device).expand(token_ids.shape)
    same = (candidates.token_ids[..., None] == token_ids[..., None, :]) & present[..., None, :]  # [B, γ, K, M]
    boosted = candidates.scores + (same * bias[..., None, :]).sum(-1)
    earlier = (token_ids[..., None] == token_ids[..., None, :]) & present[..., None, :]
    repeated = earlier.tril(-1).any(-1)
    fresh = present & ~same.any(-2) & ~repeated
    added = torch.where(fresh, base + bias, float("-inf"))
    return Candidates(torch.cat([candidates.token_ids, token_ids], -1), torch.cat([boosted, added], -1))
