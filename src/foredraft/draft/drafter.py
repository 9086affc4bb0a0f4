"""The `Drafter` protocol and a drafter's view of a request.

A drafter guesses; it never decides what is emitted, never touches the scheduler, and keeps what it remembers of a
request under `request_id` until `release`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from foredraft.draft.proposal import DraftProposal
from foredraft.sampling.state import SamplingState


@dataclass(frozen=True)
class DraftRequest:
    """What a drafter may know of a request.

    Args:
        token_ids: prompt and output so far; the last one is the anchor. Live: read, never written or kept.
        block_table: KV-cache blocks, with room for `max_draft_tokens` tokens past the anchor.
        max_draft_tokens: longest draft wanted; 0 for none.
        state: the request's transforms and noise, which draft sampling shares with the target.
        prediction: text the client expects, as token ids.
        block_hashes: of the text of the table's full blocks; empty when blocks are not shared.
    """

    request_id: str
    token_ids: Sequence[int]
    block_table: Sequence[int]
    max_draft_tokens: int
    state: SamplingState
    prediction: Sequence[int] = field(default=())
    block_hashes: Sequence[bytes] = field(default=())


@dataclass(frozen=True)
class Observation:
    """What one target forward showed of a request.

    Args:
        rows: of the forward's features, those of the positions from `start` on, all of tokens that are now committed.
            The first ones of a request start past 0 when it reuses blocks, as far as `num_reusable` let it.
        block_table, block_hashes: as of `DraftRequest`.
    """

    request_id: str
    start: int
    rows: Sequence[int]
    block_table: Sequence[int]
    block_hashes: Sequence[bytes] = field(default=())


class Drafter(Protocol):
    """Proposes tokens for a batch of requests."""

    method: str
    feature_layers: tuple[int, ...]
    """Target layers whose hidden states `observe` wants; empty for none."""

    @property
    def corrector(self) -> str | None:
        """The name of the causal corrector, for reports; None where there is none."""
        ...

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        """Drafts at most `max_draft_tokens` tokens for each request, in the order given."""
        ...

    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        """Takes the target's features of newly committed tokens.

        Args:
            features: [T, d] for each of `feature_layers`, of all tokens of a forward.
        """
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request: it finished and still holds its blocks, or they were taken away and its table is empty."""
        ...

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """How many of these leading blocks of a new request, computed by the target for others, the drafter can do
        without observing; all, when it has its context in them or needs none."""
        ...
