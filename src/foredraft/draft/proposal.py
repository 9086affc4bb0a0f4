"""What a drafter hands to verification: tokens, the distributions they were sampled from, and optionally a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DenseProbs:
    """Draft distributions over the whole vocabulary: `probs` [B, γ, V], each row summing to 1."""

    probs: Tensor


@dataclass(frozen=True)
class SparseProbs:
    """Draft distributions with mass on few candidates only.

    `candidates` [B, γ, K] int64 token ids (distinct in a row where their probability is above 0) and `probs`
    [B, γ, K]; every other token has draft probability 0.
    """

    candidates: Tensor
    probs: Tensor


@dataclass(frozen=True)
class DraftTree:
    """The shape of tree drafts; node j of request b hangs below node `parents[b, j]`, or below the anchor for -1.

    `parents` [B, n] int64, parents before children (`parents[b, j] < j`), children of a node in the order in which
    they are tried; `depths` [B, n] int64, 1 for children of the anchor.
    """

    parents: Tensor
    depths: Tensor


@dataclass(frozen=True)
class DraftProposal:
    """Drafts for a batch of requests.

    Args:
        token_ids: [B, γ] int64; entries at or past `lengths` are padding. With a tree, γ counts nodes.
        lengths: [B] int64, draft tokens (or tree nodes) of each request; 0 is allowed.
        probs: exactly what `token_ids` were sampled from. A drafter without randomness gives one-hot `SparseProbs`.
            With a tree, node j was drawn from row j after its earlier siblings' tokens were taken out: siblings drawn
            without replacement share a row, and ones that were not drawn at all have one-hot rows of their own.
        confidence: [B, γ], predicted probability that the token is accepted given that those before it are.
    """

    token_ids: Tensor
    lengths: Tensor
    probs: DenseProbs | SparseProbs
    confidence: Tensor | None = None
    tree: DraftTree | None = None

    @staticmethod
    def deterministic(drafts: list[list[int]], device: torch.device | str = "cpu") -> DraftProposal:
        """A proposal of ragged `drafts` whose draft distributions are one-hot."""
        width = max((len(draft) for draft in drafts), default=0)
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        token_ids = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(drafts), width)
        lengths = torch.tensor([len(draft) for draft in drafts], dtype=torch.int64, device=device)
        one_hot = SparseProbs(token_ids[..., None], torch.ones_like(token_ids[..., None], dtype=torch.float32))
        return DraftProposal(token_ids, lengths, one_hot)
