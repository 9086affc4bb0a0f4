"""Token verification: Leviathan et al. 2023; Chen et al. 2023."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.draft.proposal import DraftProposal
from foredraft.verify.ratio import draft_probs_at_tokens, emitted, target_probs_at_tokens
from foredraft.verify.verification import Verification


def verify_token(
    proposal: DraftProposal, target_probs: Tensor, accept_draws: Tensor, final_draws: Tensor
) -> Verification:
    """Accepts x_k with probability min(1, p_k(x_k) / q_k(x_k)), left to right, until the first rejection.

    Args:
        proposal: drafts [B, γ] with what they were sampled from.
        target_probs: [B, γ+1, V]; row k given the drafts before k. Rows past a request's length are not looked at but
            for the one right after it.
        accept_draws: [B, γ] in (0, 1).
        final_draws: [B] in (0, 1), independent of the others.
    """
    p, q = target_probs_at_tokens(target_probs, proposal.token_ids), draft_probs_at_tokens(proposal)
    inside = torch.arange(p.shape[1], device=p.device) < proposal.lengths[:, None]
    accepted = (accept_draws * q < p) & inside
    num_accepted = accepted.int().cumprod(-1).sum(-1)
    return emitted(proposal, target_probs, num_accepted, torch.ones_like(final_draws), final_draws)
