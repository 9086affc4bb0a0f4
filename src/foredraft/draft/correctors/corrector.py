"""What all causal correctors share.

A parallel drafter predicts every slot from the prefix alone. A corrector makes slot k depend on the drafts
before it: q_k(v | x0, x<k) ∝ exp(S_k(x<k, v)), at a cost far below the backbone's. Each has a teacher-forced
form, all slots at once given the true tokens before them, which is what is trained, and a sampling form, slot
by slot, whose q is exactly what was drawn from.

Slot k's scores have C columns: the draft vocabulary, or K candidates of the slot. With candidates the
sequential work is on K columns only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foredraft.draft.correctors.confidence import ConfidenceHead
from foredraft.draft.correctors.sampler import SlotSampler
from foredraft.draft.lattice import Chain, path_rows
from foredraft.draft.proposal import DenseProbs, SparseProbs

Embed = Callable[[Tensor], Tensor]
"""Token ids [n] to the target's frozen embeddings [n, d]."""


@dataclass(frozen=True)
class Sizes:
    """What a corrector is built for.

    Args:
        hidden_size: d, of the backbone's hidden states and the target's embeddings.
        vocab_size: V, of the target.
        num_slots: most drafts of a block.
        draft_ids: [Vd] target ids of the draft vocabulary; None when it is the target's.
    """

    hidden_size: int
    vocab_size: int
    num_slots: int
    draft_ids: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """Size of the draft vocabulary."""
        return self.vocab_size if self.draft_ids is None else len(self.draft_ids)


@dataclass(frozen=True)
class Corrected:
    """Drafts of a batch.

    Args:
        token_ids: [B, γ].
        probs: what they were drawn from.
        confidence: [B, γ], predicted acceptance given that the tokens before were accepted; None without a
            head. A position's depends on the tokens before it, never on its own.
    """

    token_ids: Tensor
    probs: DenseProbs | SparseProbs
    confidence: Tensor | None


class Corrector(nn.Module, ABC):
    """Prefix dependence for a parallel drafter's logits.

    Args:
        num_candidates: K, or None to correct the whole draft vocabulary.
    """

    prefix = ""
    """Of this corrector's tensors in a drafter's file, as published drafters have it."""
    predecessor_size = 0
    """Width of `predecessor`."""
    needs_embedding = False
    """Whether `bind` must have been called."""
    draft_ids: Tensor | None

    def __init__(self, sizes: Sizes, num_candidates: int | None) -> None:
        super().__init__()
        self.sizes = sizes
        self.num_candidates = num_candidates
        self.register_buffer("draft_ids", sizes.draft_ids, persistent=False)
        self.confidence_head: ConfidenceHead | None = None
        self._embed: Embed | None = None

    def bind(self, embed: Embed) -> None:
        """Gives access to the target's embeddings, which stay the target's."""
        self._embed = embed

    def raw_embeddings(self, token_ids: Tensor) -> Tensor:
        """The target's embeddings of ids of any shape [..., d]."""
        assert self._embed is not None, "bind() comes first"
        return self._embed(token_ids.reshape(-1)).float().reshape(*token_ids.shape, -1)

    def embeddings(self, token_ids: Tensor) -> Tensor:
        """The same, scaled to a root mean square of 1, since models differ in how large theirs are."""
        rows = self.raw_embeddings(token_ids)
        return nn.functional.rms_norm(rows, (rows.shape[-1],), eps=1e-6)

    def column_ids(self, batch: int) -> Tensor | None:
        """Token ids of the draft vocabulary's columns [B, Vd]; None when it is the target's."""
        return None if self.draft_ids is None else self.draft_ids.expand(batch, -1)

    def freeze(self, dtype: torch.dtype) -> None:
        """Computes once what sampling needs again and again; training comes before."""

    def predecessor(self, previous: Tensor) -> Tensor | None:
        """What the confidence head sees of the token before each slot [N, γ]: [N, γ, predecessor_size], or
        None."""
        return None

    @abstractmethod
    def teacher_forced(
        self, unary_logits: Tensor, hidden: Tensor, previous: Tensor, candidates: Tensor | None = None
    ) -> Tensor:
        """Corrected scores [N, γ, C] of all slots at once, differentiable.

        Args:
            unary_logits: [N, γ, C].
            hidden: [N, γ, d], the backbone's.
            previous: [N, γ], the token before each slot: the anchor, then the true tokens.
            candidates: [N, γ, C] token ids of the columns; None when they are the draft vocabulary.
        """

    def correct(
        self,
        unary_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        sampler: SlotSampler,
        candidates: Tensor | None = None,
    ) -> Corrected:
        """Draws all slots in turn.

        Args:
            unary_logits: [B, γ, C].
            hidden: [B, γ, d].
            anchor: [B].
            sampler: fresh; turns each slot's scores into tokens.
            candidates: [B, γ, C], as in `teacher_forced`.
        """
        if candidates is not None:
            sampler.foresee(candidates)
        elif self.draft_ids is not None:
            sampler.foresee(self.draft_ids.expand(len(anchor), hidden.shape[1], -1))
        scores = self.draw_slots(unary_logits, hidden, anchor, sampler, candidates)
        confidence = None
        if self.confidence_head is not None:
            previous = torch.cat([anchor[:, None], sampler.token_ids[:, :-1]], 1)
            logits = self.confidence_head(hidden, self.predecessor(previous), torch.stack(scores, 1))
            confidence = self.confidence_head.calibrated(logits)
        return Corrected(sampler.token_ids, sampler.probs, confidence)

    @abstractmethod
    def draw_slots(
        self,
        unary_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        sampler: SlotSampler,
        candidates: Tensor | None,
    ) -> list[Tensor]:
        """The sampling form: draws each slot; returns each slot's scores [B, C] given the drafts before
        it."""


class FirstOrder(Corrector):
    """A corrector that looks at the token before only, so that its candidates form an exact Markov chain."""

    @abstractmethod
    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor | None, first_slot: int = 0) -> Tensor:
        """B_k(a, v), what previous token a adds to the score of v [N, γ, A, C].

        Args:
            hidden: [N, γ, d].
            previous: [N, γ, A], alternatives for the token before each slot.
            candidates: [N, γ, C], or None for the draft vocabulary.
            first_slot: the slot that the γ given ones begin with.
        """

    def unary(self, unary_logits: Tensor) -> Tensor:
        """The part of the score that does not depend on the token before [N, γ, C]."""
        return unary_logits

    def teacher_forced(
        self, unary_logits: Tensor, hidden: Tensor, previous: Tensor, candidates: Tensor | None = None
    ) -> Tensor:
        return self.unary(unary_logits) + self.edges(hidden, previous[..., None], candidates)[:, :, 0]

    def lattice(self, unary_logits: Tensor, hidden: Tensor, anchor: Tensor, candidates: Tensor) -> Chain:
        """The scores of all steps between candidates.

        Args:
            unary_logits, candidates: [B, γ, K].
            hidden: [B, γ, d].
            anchor: [B].
        """
        first = anchor[:, None, None].expand(-1, 1, candidates.shape[-1])
        previous = torch.cat([first, candidates[:, :-1]], 1)  # [B, γ, K]
        scores = self.unary(unary_logits)[:, :, None] + self.edges(hidden, previous, candidates)  # [B, γ, K, K]
        return Chain(scores[:, 0, 0], scores[:, 1:])

    def draw_slots(
        self,
        unary_logits: Tensor,
        hidden: Tensor,
        anchor: Tensor,
        sampler: SlotSampler,
        candidates: Tensor | None,
    ) -> list[Tensor]:
        scores = []
        if candidates is not None:
            chain = self.lattice(unary_logits, hidden, anchor, candidates)
            if not sampler.looks_back:
                return list(path_rows(chain, sampler.draw_chain(chain, candidates)).unbind(1))
            batch = torch.arange(len(anchor), device=anchor.device)
            scores.append(chain.first)
            for slot in range(chain.num_slots):
                column, _ = sampler.draw(scores[-1], candidates[:, slot])
                if slot + 1 < chain.num_slots:
                    scores.append(chain.edges[batch, slot, column])
            return scores
        base, previous = self.unary(unary_logits), anchor
        for slot in range(unary_logits.shape[1]):
            bias = self.edges(hidden[:, slot : slot + 1], previous[:, None, None], None, slot)[:, 0, 0]
            scores.append(base[:, slot] + bias)
            _, previous = sampler.draw(scores[-1], self.column_ids(len(anchor)))
        return scores


class SuccessorTable(nn.Module):
    """Output embeddings of the draft vocabulary, `weight` [Vd, rank], looked up by target id.

    Starts at zero, so that a corrector that ends in it starts as an exact no-op.
    """

    column_of: Tensor | None

    def __init__(self, sizes: Sizes, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes.num_columns, rank))
        column_of = None
        if sizes.draft_ids is not None:
            column_of = torch.zeros(sizes.vocab_size, dtype=torch.int64)
            column_of[sizes.draft_ids] = torch.arange(sizes.num_columns)
        self.register_buffer("column_of", column_of, persistent=False)

    def rows(self, candidates: Tensor) -> Tensor:
        """[..., C] token ids to [..., C, rank]."""
        columns = candidates if self.column_of is None else self.column_of[candidates]
        return nn.functional.embedding(columns, self.weight)

    def forward(self, features: Tensor, candidates: Tensor | None) -> Tensor:
        """Inner products of `features` [..., rank] with all of the draft vocabulary [..., C], or, when
        `features` is [N, γ, A, rank], with each slot's candidates [N, γ, C]: [N, γ, A, C]."""
        if candidates is None:
            return nn.functional.linear(features, self.weight)
        return features @ self.rows(candidates).transpose(-1, -2)
