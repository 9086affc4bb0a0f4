"""Acceptance by equality: greedy decoding, and the coupled rule (Daliri et al. 2024), of which greedy is the case
without noise. The output is the target's own tokens, whatever was drafted."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.verify.verification import Verification


def verify_match(draft_token_ids: Tensor, lengths: Tensor, target_tokens: Tensor) -> Verification:
    """Accepts drafts while they equal the target's token, then emits the target's.

    Args:
        draft_token_ids: [B, γ].
        lengths: [B], draft tokens of each request.
        target_tokens: [B, γ+1], the target's token at each position, given the drafts before it.
    """
    gamma = draft_token_ids.shape[1]
    inside = torch.arange(gamma, device=lengths.device) < lengths[:, None]
    equal = (draft_token_ids == target_tokens[:, :gamma]) & inside
    num_accepted = equal.int().cumprod(-1).sum(-1)
    # Accepted drafts are the target's tokens, and so is the one after them.
    return Verification(target_tokens, num_accepted)
