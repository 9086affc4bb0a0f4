"""How long drafts are: the one place that decides it.

A policy is asked twice a step, before drafting and after it, and then told what came. It knows neither tokens nor
models: lengths, probabilities and seconds only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from foredraft.draft.proposal import DraftProposal


@dataclass(frozen=True)
class Draftable:
    """What a policy may know of a request that samples in this step.

    Args:
        room: longest draft that it may have.
        num_tokens: of its text.
        num_remaining: output tokens that may still come.
        immune: its output does not depend on drafts (greedy, coupled), so its draft may be looked at whole.
    """

    request_id: str
    room: int
    num_tokens: int
    num_remaining: int
    immune: bool


@dataclass(frozen=True)
class StepOutcome:
    """What a step gave.

    Args:
        accepted: draft tokens accepted of each request; None where nothing could be verified.
        num_emitted: tokens emitted by all requests together.
        num_tokens: in the target's forward.
        target_seconds: from the target's forward to its tokens.
        rest_seconds: outside both models.
    """

    accepted: Sequence[int | None]
    num_emitted: int
    num_tokens: int
    target_seconds: float
    rest_seconds: float


class LengthPolicy(Protocol):
    """Decides how long drafts are."""

    @property
    def num_parked(self) -> int:
        """Requests that do not draft for now because it would not pay; read from any thread."""
        ...

    def choose(self, requests: Sequence[Draftable], num_prefill_tokens: int) -> list[int]:
        """How many tokens to draft for each request, at most its room; 0 for none."""
        ...

    def cut(self, proposal: DraftProposal, seconds: float) -> DraftProposal:
        """The part of the drafts just made, in `seconds`, that is to be verified."""
        ...

    def learn(self, outcome: StepOutcome) -> None:
        """Takes what became of the step."""
        ...

    def release(self, request_id: str) -> None:
        """Forgets a request: it finished, or its drafter's memory of it is gone."""
        ...


class FixedLengths:
    """Always the longest draft there is room for."""

    num_parked = 0

    def choose(self, requests: Sequence[Draftable], num_prefill_tokens: int) -> list[int]:
        return [request.room for request in requests]

    def cut(self, proposal: DraftProposal, seconds: float) -> DraftProposal:
        return proposal

    def learn(self, outcome: StepOutcome) -> None:
        pass

    def release(self, request_id: str) -> None:
        pass


def shortened(proposal: DraftProposal, lengths: Sequence[int]) -> DraftProposal:
    """A proposal whose drafts end at `lengths`; a prefix of a tree's nodes is a tree, since parents come first."""
    return replace(proposal, lengths=torch.tensor(lengths, dtype=torch.int64, device=proposal.lengths.device))
