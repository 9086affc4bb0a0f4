"""Prompt lookup: draft what followed the longest recent match of the last tokens in the request's own text.

Source: Saxena 2023 (prompt lookup decoding). The index grows with the text, so a step costs a few dictionary look-ups
whatever the context's length.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.proposal import DraftProposal
from foredraft.draft.trees import padded_tree

NUM_REMEMBERED = 8
"""Continuations kept of an n-gram, the latest ones."""


class SuffixIndex:
    """For every n-gram of a growing text, n in [`shortest`, `longest`]: where its latest continuations start."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._continuations: dict[tuple[int, ...], list[int]] = {}
        self._num_indexed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Indexes the n-grams of `tokens` that have a continuation and were not indexed before."""
        for start in range(max(self._num_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= start:
                    starts = self._continuations.setdefault(tuple(tokens[start - size : start]), [])
                    starts.append(start)
                    del starts[:-NUM_REMEMBERED]
        self._num_indexed = len(tokens)

    def find(self, suffix: Sequence[int]) -> list[int]:
        """Where the continuations of the longest indexed ending of `suffix` start, the latest first."""
        for size in self._sizes:
            if size <= len(suffix):
                found = self._continuations.get(tuple(suffix[len(suffix) - size :]))
                if found:
                    return found[::-1]
        return []


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
        tree_width: continuations that are drafted side by side, merged where they begin alike.
    """

    method = "ngram"
    corrector: str | None = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self, shortest: int = 2, longest: int = 4, tree_width: int = 1) -> None:
        self._shortest = shortest
        self._longest = longest
        self._width = tree_width
        self._indexes: dict[str, SuffixIndex] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        found = [self._continuations(request) for request in requests]
        if self._width == 1:
            return DraftProposal.deterministic([chains[0] if chains else [] for chains in found])
        merged = [merge(chains, request.max_draft_tokens) for chains, request in zip(found, requests, strict=True)]
        return tree_proposal([tokens for tokens, _ in merged], [parents for _, parents in merged])

    def _continuations(self, request: DraftRequest) -> list[list[int]]:
        """Up to `tree_width` continuations, the likeliest first; together about as long as wanted."""
        if request.max_draft_tokens == 0:
            return []
        index = self._indexes.get(request.request_id)
        if index is None:
            index = self._indexes[request.request_id] = SuffixIndex(self._shortest, self._longest)
        index.extend(request.token_ids)
        starts = index.find(request.token_ids[-self._longest :])[: self._width]
        return [copied(request.token_ids, start, request.max_draft_tokens) for start in starts]

    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        pass

    def release(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        return len(block_hashes)


def merge(chains: Sequence[Sequence[int]], num_nodes: int) -> tuple[list[int], list[int]]:
    """A tree of at most `num_nodes` nodes from chains that may begin alike: its tokens and parents.

    The chains grow in turn, one level at a time, so that each gets a part of the nodes.
    """
    tokens: list[int] = []
    parents: list[int] = []
    nodes: dict[tuple[int, int], int] = {}  # (parent, token) -> node
    at = [-1] * len(chains)
    for level in range(max(map(len, chains), default=0)):
        for number, chain in enumerate(chains):
            key = (at[number], chain[level])
            if key not in nodes:
                if len(tokens) == num_nodes:
                    return tokens, parents
                nodes[key] = len(tokens)
                tokens.append(chain[level])
                parents.append(at[number])
            at[number] = nodes[key]
    return tokens, parents


def tree_proposal(tokens: Sequence[list[int]], parents: Sequence[list[int]]) -> DraftProposal:
    """Trees whose nodes were not drawn but looked up: each has a one-hot distribution of its own."""
    proposal = DraftProposal.deterministic(list(tokens))
    return DraftProposal(proposal.token_ids, proposal.lengths, proposal.probs, tree=padded_tree(parents))
