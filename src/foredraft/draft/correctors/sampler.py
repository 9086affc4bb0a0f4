"""Turns one slot's draft scores after another into tokens, and keeps exactly what they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.draft.proposal import DenseProbs, SparseProbs
from foredraft.sampling.choose import draw_drafts
from foredraft.sampling.state import SamplingState
from foredraft.sampling.transform import process_drafts

NEVER = float("-inf")


class SlotSampler:
    """Draws the drafts of a batch of requests, slot by slot, under each request's own transforms and noise.

    Args:
        states: of the requests, in the order of the scores' rows.
        draft_ids: [Vd] target ids of the columns when the drafter's vocabulary is a part of the target's.
    """

    def __init__(self, states: Sequence[SamplingState], draft_ids: Tensor | None = None) -> None:
        self._states = states
        self._draft_ids = draft_ids
        self._transforms = any(state.transforms_logits for state in states)
        self._argmax_only = not self._transforms and all(state.params.is_greedy for state in states)
        self._with_probs = not all(state.matches_target for state in states)
        self._prefixes: list[list[int]] = [[] for _ in states]
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._candidates: list[Tensor] = []

    def draw(self, scores: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draws the next slot's token of each request; returns its column [B] and its id [B].

        Args:
            scores: [B, C], after correction and before any transform.
            candidates: [B, C] token ids of the columns; None when they are the draft vocabulary.
        """
        if candidates is None and self._draft_ids is not None:
            candidates = self._draft_ids.expand(len(scores), -1)
        if self._argmax_only:
            columns = scores.argmax(-1)
            tokens = columns if candidates is None else candidates.gather(1, columns[:, None])[:, 0]
        else:
            drawn = draw_drafts(
                self._processed(scores, candidates),
                self._states,
                len(self._tokens),
                with_probs=self._with_probs,
                candidates=candidates,
            )
            tokens = columns = drawn.token_ids[:, 0]
            if candidates is not None:
                columns = (candidates == tokens[:, None]).to(torch.int8).argmax(-1)
            if drawn.probs is not None:
                self._probs.append(drawn.probs)
                if candidates is not None:
                    self._candidates.append(candidates)
        self._tokens.append(tokens)
        if self._transforms:
            for prefix, token in zip(self._prefixes, tokens.tolist(), strict=True):
                prefix.append(token)
        return columns, tokens

    @property
    def token_ids(self) -> Tensor:
        """What was drawn so far [B, γ]."""
        return torch.stack(self._tokens, 1)

    @property
    def probs(self) -> DenseProbs | SparseProbs:
        """The distributions that the tokens were drawn from; one-hot when no request's verification weighs
        them."""
        if not self._probs:
            tokens = self.token_ids[..., None]
            return SparseProbs(tokens, torch.ones_like(tokens, dtype=torch.float32))
        probs = torch.stack(self._probs, 1)
        if not self._candidates:
            return DenseProbs(probs)
        return SparseProbs(torch.stack(self._candidates, 1), probs)

    def _processed(self, scores: Tensor, candidates: Tensor | None) -> Tensor:
        """Scores after the requests' transforms [B, C].

        A request whose transforms bar every candidate keeps its raw scores: whatever it drafts will be
            rejected, and a
        distribution that is one can be verified.
        """
        if candidates is None or not self._transforms:
            processed = process_drafts(scores, self._states, self._prefixes)
        else:
            # Transforms speak of the target's vocabulary. Of duplicate candidates one is -inf and must not
            # win the write.
            shape = (len(scores), self._states[0].vocab_size)
            wide = torch.full(shape, NEVER, device=scores.device)
            wide = wide.scatter_reduce(1, candidates, scores.float(), "amax")
            processed = process_drafts(wide, self._states, self._prefixes).gather(1, candidates)
            processed = processed.masked_fill(scores == NEVER, NEVER)
        if self._transforms:
            barred = processed.amax(-1, keepdim=True) == NEVER
            processed = torch.where(barred, scores.float(), processed)
        return processed
