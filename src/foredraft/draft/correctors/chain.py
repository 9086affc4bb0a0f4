"""`chain`: foredraft's own corrector: first-order edges over deep codebooks, gated by the slot's hidden
state.

S_k(a, b) = α_k · U_k(b) + λ_k · ⟨P h_k ⊙ φ(E_a), ψ(E_b)⟩, with E the target's frozen embeddings and φ, ψ
small networks whose tables over the vocabulary are computed once. λ starts at 0 and α at 1: an exact no-op.
Only the networks are stored, so the corrector's size does not grow with the vocabulary, and tokens that
training never saw get codes from their embeddings. What the scores of all steps make possible is in
`draft.lattice`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.draft.correctors.corrector import FirstOrder, Sizes
from foredraft.draft.correctors.sampler import NEVER

TABLE_ROWS = 8192
"""Tokens whose codes are computed at a time."""


class ChainCorrector(FirstOrder):
    """Context-gated first-order edges.

    Args:
        rank: r of the codes.
        width: of the networks' inner layer.
    """

    prefix = "chain."
    needs_embedding = True

    def __init__(self, sizes: Sizes, num_candidates: int | None = 16, rank: int = 128, width: int = 256) -> None:
        super().__init__(sizes, num_candidates)
        self.predecessor_size = rank
        self.project = nn.Linear(sizes.hidden_size, rank, bias=False)
        self.phi = _codes(sizes.hidden_size, width, rank)
        self.psi = _codes(sizes.hidden_size, width, rank)
        self.alpha = nn.Parameter(torch.ones(sizes.num_slots))
        self.lambda_ = nn.Parameter(torch.zeros(sizes.num_slots))
        self._tables: tuple[Tensor, Tensor] | None = None  # φ and ψ of every token [V, r]

    @torch.no_grad()
    def freeze(self, dtype: torch.dtype) -> None:
        ids = torch.arange(self.sizes.vocab_size, device=self.project.weight.device)
        phi, psi = [], []
        for some in torch.split(ids, TABLE_ROWS):  # embeddings of the whole vocabulary would take more than the tables
            embedded = self.embeddings(some)
            phi.append(self.phi(embedded).to(dtype))
            psi.append(self.psi(embedded).to(dtype))
        self._tables = torch.cat(phi), torch.cat(psi)

    def train(self, mode: bool = True) -> ChainCorrector:
        if mode:
            self._tables = None
        super().train(mode)
        return self

    def predecessor(self, previous: Tensor) -> Tensor:
        if self._tables is None:
            return self.phi(self.embeddings(previous))
        return F.embedding(previous, self._tables[0]).float()

    def _successor(self, token_ids: Tensor) -> Tensor:
        if self._tables is None:
            return self.psi(self.embeddings(token_ids))
        return F.embedding(token_ids, self._tables[1]).float()

    def unary(self, unary_logits: Tensor) -> Tensor:
        never = unary_logits == NEVER  # whatever the sign of α, and without 0 · -inf in its gradient
        scaled = self.alpha[: unary_logits.shape[1], None] * unary_logits.masked_fill(never, 0.0)
        return scaled.masked_fill(never, NEVER)

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor | None, first_slot: int = 0) -> Tensor:
        scale = self.lambda_[first_slot : first_slot + hidden.shape[1], None]
        context = (scale * self.project(hidden))[:, :, None] * self.predecessor(previous)  # [N, γ, A, r]
        if candidates is not None:
            return context @ self._successor(candidates).transpose(-1, -2)
        everything = torch.arange(self.sizes.vocab_size, device=hidden.device)
        columns = everything if self.draft_ids is None else self.draft_ids
        return F.linear(context, self._successor(columns))


def _codes(size: int, width: int, rank: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, rank))
