"""Pieces that the token and block rules share: draft probabilities, dense or sparse, and residuals."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.sampling.choose import sample
from foredraft.verify.verification import Verification


def draft_probs_at_tokens(proposal: DraftProposal) -> Tensor:
    """q of each draft token [B, γ], float64."""
    tokens, probs = proposal.token_ids, proposal.probs
    if isinstance(probs, DenseProbs):
        vocab_size = probs.probs.shape[-1]
        at = probs.probs.gather(-1, tokens.clamp(0, vocab_size - 1)[..., None])[..., 0]
        return torch.where((tokens >= 0) & (tokens < vocab_size), at, 0.0).double()
    matches = probs.candidates == tokens[..., None]
    return (probs.probs * matches).sum(-1).double()


def target_probs_at_tokens(target_probs: Tensor, token_ids: Tensor) -> Tensor:
    """p of each draft token [B, γ], float64; 0 for an id outside the vocabulary, which can then never be accepted.

    Args:
        target_probs: [B, γ+1, V].
    """
    gamma, vocab_size = token_ids.shape[1], target_probs.shape[-1]
    known = (token_ids >= 0) & (token_ids < vocab_size)
    at = target_probs[:, :gamma].gather(-1, token_ids.clamp(0, vocab_size - 1)[..., None])[..., 0]
    return torch.where(known, at, 0.0).double()


def subtract_draft(target: Tensor, probs: DenseProbs | SparseProbs, rows: Tensor, positions: Tensor) -> Tensor:
    """max(target − q, 0) for q of (rows[i], positions[i]): `target` [n, V] is not changed."""
    if isinstance(probs, DenseProbs):
        return (target - probs.probs[rows, positions].to(target.dtype)).clamp(min=0)
    candidates, mass = probs.candidates[rows, positions], probs.probs[rows, positions].to(target.dtype)
    known = (candidates >= 0) & (candidates < target.shape[-1])
    safe = candidates.clamp(0, target.shape[-1] - 1)
    return target.scatter_add(-1, safe, torch.where(known, -mass, 0.0)).clamp(min=0)


def overlap(target: Tensor, scale: Tensor, probs: DenseProbs | SparseProbs) -> Tensor:
    """Σ_v min(scale · p(v), q(v)) [B, γ], float64, without making a sparse q dense.

    Args:
        target: [B, γ, V].
        scale: [B, γ] float64.
    """
    if isinstance(probs, DenseProbs):
        return torch.minimum(target.double() * scale[..., None], probs.probs.double()).sum(-1)
    candidates = probs.candidates
    known = (candidates >= 0) & (candidates < target.shape[-1])
    at = target.gather(-1, candidates.clamp(0, target.shape[-1] - 1)).double() * scale[..., None]
    return torch.minimum(torch.where(known, at, 0.0), probs.probs.double()).sum(-1)


def emitted(
    proposal: DraftProposal, target_probs: Tensor, num_accepted: Tensor, weight: Tensor, final_draws: Tensor
) -> Verification:
    """The accepted drafts and the final token: from p after a full acceptance, else from the residual.

    Args:
        weight: [B], the factor on p in the residual norm(max(weight · p − q, 0)); 1 for the token rule.
    """
    batch = torch.arange(len(num_accepted), device=num_accepted.device)
    bonus = target_probs[batch, num_accepted].double()  # [B, V]
    final = bonus
    rejected = num_accepted < proposal.lengths
    if bool(rejected.any()):
        rows = rejected.nonzero()[:, 0]
        scaled = bonus[rows] * weight[rows, None]
        residual = subtract_draft(scaled, proposal.probs, rows, num_accepted[rows])
        # No mass left means that p and q are equal up to rounding: then a draw from p is right.
        empty = residual.sum(-1, keepdim=True) <= 0
        final = bonus.clone()
        final[rows] = torch.where(empty, bonus[rows], residual)
    tokens = torch.nn.functional.pad(proposal.token_ids, (0, 1))
    tokens[batch, num_accepted] = sample(final, final_draws)
    return Verification(tokens, num_accepted)
