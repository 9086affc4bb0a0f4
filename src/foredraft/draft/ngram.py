"""Prompt lookup: draft what followed the longest recent match of the last tokens in the request's own text.

Source: Saxena 2023 (prompt lookup decoding). The index grows with the text, so a step costs a few dictionary look-ups
whatever the context's length.
"""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.proposal import DraftProposal


class SuffixIndex:
    """For every n-gram of a growing text, n in [`shortest`, `longest`]: where its latest continuation starts."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._continuations: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the n-grams of `tokens` that have a continuation and were not indexed before."""
        for start in range(max(self._num_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= start:
                    self._continuations[tuple(tokens[start - size : start])] = start
        self._num_indexed = len(tokens)

    def find(self, suffix: Sequence[int]) -> int | None:
        """Where the latest continuation of the longest indexed ending of `suffix` starts, or None."""
        for size in self._sizes:
            if size <= len(suffix):
                found = self._continuations.get(tuple(suffix[len(suffix) - size :]))
                if found is not None:
                    return found
        return None


def copied(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end the copy goes on with itself, as a repeating text does."""
    draft: list[int] = []
    for position in range(start, start + count):
        draft.append(tokens[position] if position < len(tokens) else draft[position - len(tokens)])
    return draft


class NgramDrafter:
    """Drafts from the request's own prompt and output.

    Args:
        shortest, longest: sizes of the suffix that is looked up, longest first, in tokens.
    """

    method = "ngram"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, shortest: int = 2, longest: int = 4) -> None:
        self._shortest = shortest
        self._longest = longest
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        return DraftProposal.deterministic([self._draft(request) for request in requests])

    def _draft(self, request: DraftRequest) -> list[int]:
        if request.max_draft_tokens == 0:
            return []
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = SuffixIndex(self._shortest, self._longest)
        index.extend(request.token_ids)
        start = index.find(request.token_ids[-self._longest :])
        return [] if start is None else copied(request.token_ids, start, request.max_draft_tokens)

    def observe(self, observations: Sequence[Observation]) -> None:
        pass

    def release(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)
