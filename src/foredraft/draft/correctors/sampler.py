"""Turns one slot's draft scores after another into tokens, and keeps exactly what they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.draft.lattice import Chain, path_rows, sample_path
from foredraft.draft.proposal import DenseProbs, SparseProbs
from foredraft.sampling.choose import draw_drafts, step_position
from foredraft.sampling.noise import Stream, gumbel_at
from foredraft.sampling.state import SamplingState
from foredraft.sampling.transform import process_drafts

NEVER = float("-inf")


class SlotSampler:
    """Draws the drafts of a batch of requests, slot by slot, under each request's own transforms and noise.

    Args:
        states: of the requests, in the order of the scores' rows.
    """

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self._states = states
        self._transforms = any(state.transforms_logits for state in states)
        self._argmax_only = not self._transforms and all(state.params.is_greedy for state in states)
        self._with_probs = not all(state.matches_target for state in states)
        self._prefixes: list[list[int]] = [[] for _ in states]
        self._tokens: list[Tensor] = []
        self._probs: list[Tensor] = []
        self._candidates: list[Tensor] = []
        self._noise: Tensor | None = None  # [B, γ, C], 0 for greedy requests
        greedy = [state.params.is_greedy for state in states]
        self._one_hot = torch.tensor(greedy) if any(greedy) else None

    def foresee(self, candidates: Tensor) -> None:
        """Makes the noise of all slots' candidates [B, γ, C] at once, at a fraction of the cost of turns."""
        if not self._argmax_only:
            self._noise = self.noise_of(candidates)

    def noise_of(self, candidates: Tensor) -> Tensor:
        """Each request's Gumbel noise for the next slots' candidates [B, γ, C]; 0 for greedy requests."""
        batch, num_slots, _ = candidates.shape
        noise = torch.zeros(candidates.shape, device=candidates.device)
        for stream in (Stream.COUPLED, Stream.DRAFT):
            members = [index for index in range(batch) if self._stream(index) is stream]
            if members:
                each = [(self._states[index], slot) for index in members for slot in range(num_slots)]
                seeds = [state.seed for state, _ in each]
                positions = [
                    state.num_tokens + slot if stream is Stream.COUPLED else step_position(state.num_tokens, slot)
                    for state, slot in each
                ]
                part = gumbel_at(seeds, positions, stream, candidates[members].flatten(0, 1))
                noise[members] = part.reshape(len(members), num_slots, -1)
        return noise

    def _stream(self, index: int) -> Stream | None:
        """Where a request's noise comes from: the coupled rule shares its target's; None for greedy."""
        state = self._states[index]
        if state.params.is_greedy:
            return None
        return Stream.COUPLED if state.verification == "coupled" else Stream.DRAFT

    def draw(self, scores: Tensor, candidates: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Draws the next slot's token of each request; returns its column [B] and its id [B].

        Args:
            scores: [B, C], after correction and before any transform.
            candidates: [B, C] token ids of the columns, as foreseen; None when they are the target's
                vocabulary.
        """
        slot = len(self._tokens)
        if self._argmax_only:
            columns = scores.argmax(-1)
        elif candidates is None:
            drawn = draw_drafts(
                process_drafts(scores, self._states, self._prefixes),
                self._states,
                slot,
                with_probs=self._with_probs,
            )
            columns = drawn.token_ids[:, 0]
            if drawn.probs is not None:
                self._probs.append(drawn.probs)
        else:
            assert self._noise is not None, "foresee() comes first"
            processed = self._processed(scores, candidates)
            columns = (processed + self._noise[:, slot]).argmax(-1)
            if self._with_probs:
                self._probs.append(self._probabilities(processed, columns))
                self._candidates.append(candidates)
        tokens = columns if candidates is None else candidates.gather(1, columns[:, None])[:, 0]
        self._tokens.append(tokens)
        if self._transforms:
            for prefix, token in zip(self._prefixes, tokens.tolist(), strict=True):
                prefix.append(token)
        return columns, tokens

    @property
    def looks_back(self) -> bool:
        """Whether a request's transforms look at the text, so that slots must be drawn one after another."""
        return self._transforms

    def draw_chain(self, chain: Chain, candidates: Tensor) -> Tensor:
        """What `draw` gives slot by slot, in one go, when nothing looks back; returns the columns [B, γ].

        Every step's scores are transformed and get their noise before it is known which steps are taken.

        Args:
            chain: scores after correction and before any transform.
            candidates: [B, γ, K], as foreseen.
        """
        if not self._argmax_only:
            rows = torch.cat([chain.first[:, None], chain.edges.flatten(1, 2)], 1)  # [B, 1 + (γ-1)·K, K]
            states = [state for state in self._states for _ in range(rows.shape[1])]
            processed = process_drafts(rows.flatten(0, 1), states, [()] * len(states)).reshape(rows.shape)
            chain = Chain(processed[:, 0], processed[:, 1:].reshape(chain.edges.shape))
        columns = sample_path(chain, self._noise)
        self._tokens += candidates.gather(2, columns[..., None])[..., 0].unbind(1)
        if self._with_probs:
            probs = self._probabilities(path_rows(chain, columns), columns)
            self._probs += probs.unbind(1)
            self._candidates += candidates.unbind(1)
        return columns

    def _probabilities(self, processed: Tensor, columns: Tensor) -> Tensor:
        """q [B, ..., C] of transformed scores; one-hot at `columns` [B, ...] for greedy requests."""
        probs = processed.softmax(-1)
        if self._one_hot is None:
            return probs
        certain = torch.zeros_like(probs).scatter_(-1, columns[..., None], 1.0)
        greedy = self._one_hot.to(probs.device).reshape(-1, *[1] * (probs.dim() - 1))
        return torch.where(greedy, certain, probs)

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

    def _processed(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """Scores after the requests' transforms [B, C].

        A request whose transforms bar every candidate keeps its raw scores: whatever it drafts will be
            rejected, and a
        distribution that is one can be verified.
        """
        if not self._transforms:
            processed = process_drafts(scores, self._states, self._prefixes)
        else:
            # Transforms speak of the target's vocabulary. Of duplicate candidates one is -inf and must not
            # win the write.
            shape = (len(scores), self._states[0].vocab_size)
            wide = torch.full(shape, NEVER, device=scores.device)
            wide = wide.scatter_reduce(1, candidates, scores.float(), "amax")
            processed = process_drafts(wide, self._states, self._prefixes).gather(1, candidates)
            processed = processed.masked_fill(scores == NEVER, NEVER)
            barred = processed.amax(-1, keepdim=True) == NEVER
            processed = torch.where(barred, scores.float(), processed)
        return processed
