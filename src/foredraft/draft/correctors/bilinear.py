"""`bilinear`: DFlash 2's candidate selector: S_k(a, b) = U_k(b) + ⟨A[a] ⊙ W h_k, B[b]⟩ over the top K of each
slot."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.draft.correctors.corrector import FirstOrder, Sizes


class Bilinear(FirstOrder):
    """Codebooks for the token before and the candidate, which meet in the slot's projected hidden state.

    Args:
        rank: of the codebooks A and B [V, r].
    """

    prefix = "candidate_selector."

    def __init__(self, sizes: Sizes, num_candidates: int | None = 16, rank: int = 256) -> None:
        super().__init__(sizes, num_candidates)
        self.predecessor_size = rank
        self.predecessor_codebook = nn.Parameter(torch.empty(sizes.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(sizes.vocab_size, rank))
        self.hidden_projection = nn.Linear(sizes.hidden_size, rank, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def predecessor(self, previous: Tensor) -> Tensor:
        return F.embedding(previous, self.predecessor_codebook)

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor | None, first_slot: int = 0) -> Tensor:
        context = self.hidden_projection(hidden)[:, :, None] * self.predecessor(previous)  # [N, γ, A, r]
        if candidates is not None:
            return context @ F.embedding(candidates, self.successor_codebook).transpose(-1, -2)
        columns = self.draft_ids
        return F.linear(context, self.successor_codebook if columns is None else self.successor_codebook[columns])
