"""Correctors that remember the whole drafted prefix: DSpark's recurrent head and Domino's GRU.

Their scores depend on more than the token before, so their candidates form no chain and no tree can be made
from them.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from foredraft.draft.correctors.corrector import Corrector, Sizes, SuccessorTable
from foredraft.draft.correctors.sampler import SlotSampler


class Recurrent(Corrector):
    """A corrector with a state [N, s] that takes one token after another."""

    @abstractmethod
    def start(self, hidden: Tensor) -> Tensor:
        """The state before the anchor."""

    @abstractmethod
    def advance(self, state: Tensor, previous: Tensor, hidden: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Takes the token before a slot [N] and the slot's hidden state [N, d]; returns the new state, and
        what meets the successor table [N, r]."""

    @abstractmethod
    def successors(self, features: Tensor, candidates: Tensor | None) -> Tensor:
        """Biases of a slot's columns [N, C] from `features` [N, r]."""

    def teacher_forced(
        self, unary_logits: Tensor, hidden: Tensor, previous: Tensor, candidates: Tensor | None = None
    ) -> Tensor:
        state, scores = self.start(hidden), []
        for slot in range(unary_logits.shape[1]):
            state, features = self.advance(state, previous[:, slot], hidden[:, slot], slot)
            scores.append(self._scores(unary_logits, features, candidates, slot))
        return torch.stack(scores, 1)

    def draw_slots(
        self,
        unary_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        sampler: SlotSampler,
        candidates: Tensor | None,
    ) -> list[Tensor]:
        state, previous, scores = self.start(hidden), anchor, []
        for slot in range(unary_logits.shape[1]):
            state, features = self.advance(state, previous, hidden[:, slot], slot)
            scores.append(self._scores(unary_logits, features, candidates, slot))
            ids = self.column_ids(len(anchor)) if candidates is None else candidates[:, slot]
            _, previous = sampler.draw(scores[-1], ids)
        return scores

    def _scores(self, unary_logits: Tensor, features: Tensor, candidates: Tensor | None, slot: int) -> Tensor:
        chosen = None if candidates is None else candidates[:, slot]
        return unary_logits[:, slot] + self.successors(features, chosen)


class Rnn(Recurrent):
    """DSpark's recurrent head: s_k = g⊙s_{k−1} + (1−g)⊙tanh(c), B = W2 tanh(o), with g, c, o linear in
    [s_{k−1}; W1[x_{k−1}]; h_k].

    Args:
        rank: of the state, W1 [V, r] and W2 [Vd, r].
    """

    prefix = "markov_head."

    def __init__(self, sizes: Sizes, num_candidates: int | None = None, rank: int = 256) -> None:
        super().__init__(sizes, num_candidates)
        self.predecessor_size = rank
        self.markov_w1 = nn.Embedding(sizes.vocab_size, rank)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        self.markov_w2 = SuccessorTable(sizes, rank)
        self.joint_proj = nn.Linear(2 * rank + sizes.hidden_size, 3 * rank)

    def predecessor(self, previous: Tensor) -> Tensor:
        return self.markov_w1(previous)

    def start(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), self.predecessor_size)

    def advance(self, state: Tensor, previous: Tensor, hidden: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat([state, self.markov_w1(previous), hidden], -1))
        gate, content, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return gate * state + (1 - gate) * content.tanh(), output.tanh()

    def successors(self, features: Tensor, candidates: Tensor | None) -> Tensor:
        return _products(self.markov_w2, features, candidates)


class Gru(Recurrent):
    """Domino (2605.29707): a GRU over the embeddings of the tokens before, then an MLP of [h_k; state].

    Args:
        state_size: of the GRU.
        width: of the MLP, and so the rank of the correction.
        pure_prefix: first slots that are left as they are.
    """

    needs_embedding = True

    def __init__(
        self,
        sizes: Sizes,
        num_candidates: int | None = None,
        state_size: int = 256,
        width: int = 256,
        pure_prefix: int = 0,
    ) -> None:
        super().__init__(sizes, num_candidates)
        self.pure_prefix = pure_prefix
        self.prefix_gru = nn.GRU(sizes.hidden_size, state_size, bias=False, batch_first=True)
        inner = nn.Linear(sizes.hidden_size + state_size, width, bias=False)
        self.embed_proj = nn.Sequential(inner, nn.SiLU(), SuccessorTable(sizes, width))

    def start(self, hidden: Tensor) -> Tensor:
        return hidden.new_zeros(len(hidden), self.prefix_gru.hidden_size)

    def advance(self, state: Tensor, previous: Tensor, hidden: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        embedded = self.raw_embeddings(previous)[:, None]
        state = self.prefix_gru(embedded, state[None])[1][0]
        features = self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, state], -1)))
        return state, features * 0 if slot < self.pure_prefix else features

    def successors(self, features: Tensor, candidates: Tensor | None) -> Tensor:
        table = self.embed_proj[2]
        assert isinstance(table, SuccessorTable)
        return _products(table, features, candidates)


def _products(table: SuccessorTable, features: Tensor, candidates: Tensor | None) -> Tensor:
    """Inner products [N, C] of features [N, r] with the whole table or with candidates [N, C]."""
    return table(features, None) if candidates is None else table(features[:, None], candidates)[:, 0]
