"""Low-rank bias from the token before, as in DSpark (DeepSeek 2026): plain, and gated by the slot's hidden
state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.draft.correctors.corrector import FirstOrder, Sizes, SuccessorTable


class Markov(FirstOrder):
    """B = W1[a] · W2[v]: additive, and the same in every context.

    Args:
        rank: of W1 [V, r] and W2 [Vd, r].
    """

    prefix = "markov_head."

    def __init__(self, sizes: Sizes, num_candidates: int | None = None, rank: int = 256) -> None:
        super().__init__(sizes, num_candidates)
        self.predecessor_size = rank
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = SuccessorTable(sizes, rank)

    def predecessor(self, previous: Tensor) -> Tensor:
        return self.markov_w1(previous)

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What meets W2 [N, γ, A, r]."""
        return self.markov_w1(previous)

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor | None, first_slot: int = 0) -> Tensor:
        return self.markov_w2(self.features(hidden, previous), candidates)


class Gated(Markov):
    """B = W2(σ(W_g [h_k; W1[a]]) ⊙ W1[a]): the slot's hidden state decides which parts of the bias count."""

    def __init__(self, sizes: Sizes, num_candidates: int | None = None, rank: int = 256) -> None:
        super().__init__(sizes, num_candidates, rank)
        self.gate_proj = nn.Linear(sizes.hidden_size + rank, rank)

    def features(self, hidden: Tensor, previous: Tensor) -> Tensor:
        embedded = self.markov_w1(previous)
        sizes = [hidden.shape[-1], embedded.shape[-1]]
        of_hidden, of_previous = torch.split(self.gate_proj.weight, sizes, dim=1)
        # The two halves apart, so that the hidden state's is computed once for all alternatives.
        gate = F.linear(hidden, of_hidden, self.gate_proj.bias)[:, :, None] + F.linear(embedded, of_previous)
        return gate.sigmoid() * embedded
