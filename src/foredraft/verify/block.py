"""Block verification: Sun et al. 2024 (2403.10444), algorithm 2. Never accepts fewer tokens in expectation than the
token rule, since a draft that did better than the target's odds early lends the surplus to what follows."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.verify.ratio import draft_probs_at_tokens, emitted, overlap, target_probs_at_tokens
from foredraft.verify.verification import Verification


def verify_block(
    proposal: DraftProposal, target_probs: Tensor, accept_draws: Tensor, final_draws: Tensor
) -> Verification:
    """Accepts the longest prefix whose own draw passes; arguments as in `verify_token`.

    Every position draws: one that fails does not end the search for a longer prefix that passes.
    """
    lengths = proposal.lengths
    gamma = proposal.token_ids.shape[1]
    p, q = target_probs_at_tokens(target_probs, proposal.token_ids), draft_probs_at_tokens(proposal)
    weights = [torch.ones(len(lengths), dtype=torch.float64, device=p.device)]
    for k in range(gamma):
        product = weights[-1] * p[:, k]
        # min(1, w·p/q) without dividing by a q that rounding made 0.
        weights.append(torch.where(product >= q[:, k], 1.0, product / q[:, k].clamp(min=1e-300)))
    w = torch.stack(weights, 1)  # [B, γ+1], w_0 = 1
    passing = torch.zeros(len(lengths), gamma, dtype=torch.bool, device=p.device)
    if gamma:
        if gamma > 1:
            # Row i of 1..γ-1: what of w_i·p_{i+1} lies above q_{i+1}.
            inner = w[:, 1:gamma]
            surplus = inner - overlap(target_probs[:, 1:gamma], inner, _from(proposal.probs, 1, gamma))
            surplus = surplus.clamp(min=0)
            gap = surplus + 1 - inner
            threshold = torch.where(gap > 0, surplus / gap.clamp(min=1e-300), 1.0)
            passing[:, : gamma - 1] = accept_draws[:, : gamma - 1] < threshold
        last = torch.arange(1, gamma + 1, device=p.device) == lengths[:, None]
        passing = torch.where(last, accept_draws < w[:, 1:], passing)
    index = torch.arange(1, gamma + 1, device=p.device)
    reachable = passing & (index <= lengths[:, None])
    num_accepted = (reachable * index).amax(-1) if gamma else torch.zeros_like(lengths)
    weight = w.gather(1, num_accepted[:, None])[:, 0]
    return emitted(proposal, target_probs, num_accepted, weight, final_draws)


def _from(probs: DenseProbs | SparseProbs, start: int, end: int) -> DenseProbs | SparseProbs:
    if isinstance(probs, DenseProbs):
        return DenseProbs(probs.probs[:, start:end])
    return SparseProbs(probs.candidates[:, start:end], probs.probs[:, start:end])
