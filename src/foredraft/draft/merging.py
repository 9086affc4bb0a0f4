"""One proposal for a batch from several drafters' proposals for parts of it; what was drawn from what stays exact."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs

Part = tuple[Sequence[int], DraftProposal]
"""Rows of the batch, and the proposal for them."""


def merged(parts: Sequence[Part], batch: int, device: torch.device | str) -> DraftProposal:
    """The proposal of `batch` requests; those that no part speaks of have no draft.

    Distributions become dense where one is, and else sparse over as many candidates as the widest has.

    Args:
        parts: chains, each row in one of them, either all with confidences or none.
        device: where the proposal is to be; parts may be elsewhere.
    """
    width = max((part.token_ids.shape[1] for _, part in parts), default=0)
    token_ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
    lengths = torch.zeros(batch, dtype=torch.int64, device=device)
    confidence = torch.zeros(batch, width, device=device)
    with_confidence = bool(parts) and all(part.confidence is not None for _, part in parts)
    for rows, part in parts:
        index = torch.tensor(rows, device=device)
        token_ids[index, : part.token_ids.shape[1]] = part.token_ids.to(device)
        lengths[index] = part.lengths.to(device)
        if with_confidence:
            assert part.confidence is not None
            confidence[index, : part.token_ids.shape[1]] = part.confidence.float().to(device)
    probs = _merged_probs(parts, batch, width, device)
    return DraftProposal(token_ids, lengths, probs, confidence if with_confidence else None)


def _merged_probs(
    parts: Sequence[Part], batch: int, width: int, device: torch.device | str
) -> DenseProbs | SparseProbs:
    dense = [part.probs for _, part in parts if isinstance(part.probs, DenseProbs)]
    if dense:
        vocab_size = dense[0].probs.shape[-1]
        whole = torch.zeros(batch, width, vocab_size, device=device)
        for rows, part in parts:
            index = torch.tensor(rows, device=device)
            whole[index, : part.token_ids.shape[1]] = _dense(part.probs, vocab_size).to(device)
        return DenseProbs(whole)
    sparse = [(rows, part.probs) for rows, part in parts if isinstance(part.probs, SparseProbs)]
    most = max((probs.probs.shape[-1] for _, probs in sparse), default=1)
    candidates = torch.zeros(batch, width, most, dtype=torch.int64, device=device)
    masses = torch.zeros(batch, width, most, device=device)
    for rows, probs in sparse:
        index = torch.tensor(rows, device=device)
        slots, count = probs.probs.shape[1:]
        candidates[index, :slots, :count] = probs.candidates.to(device)
        masses[index, :slots, :count] = probs.probs.float().to(device)
    return SparseProbs(candidates, masses)


def _dense(probs: DenseProbs | SparseProbs, vocab_size: int) -> Tensor:
    """Distributions [B, γ, V]."""
    if isinstance(probs, DenseProbs):
        return probs.probs
    whole = probs.probs.new_zeros(*probs.probs.shape[:2], vocab_size, dtype=torch.float32)
    # Added, since padding repeats a candidate with mass 0.
    return whole.scatter_add_(-1, probs.candidates, probs.probs.float())
