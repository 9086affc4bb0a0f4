"""Several drafters for one target: each step and request takes the one with the largest expected gain per second.

A bandit: running estimates of what each drafter's drafts are worth and what they cost decide, with optimism for those
that were rarely tried (UCB1; Auer et al. 2002), so that a losing drafter is tried ever more rarely, and costs nothing
else. A choice is made before its draft, from the past alone; where the chosen drafter has nothing to say of a text
(prompt lookup without a match), the next best one is asked, which depends on the text only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch
from torch import Tensor

from foredraft.draft.drafter import Drafter, DraftRequest, Observation
from foredraft.draft.merging import Part, merged
from foredraft.draft.proposal import DraftProposal
from foredraft.draft.rates import AcceptanceRates

EXPLORATION = 1.0
"""Tokens of optimism for a drafter at sqrt(ln(all drafts) / its drafts) = 1."""

TIME_RATE = 0.1
"""How fast estimates of seconds follow."""

SPREAD = 16
"""Steps over which catching up is spread when drafters are compared."""


@dataclass
class _Arm:
    """A drafter, and what is known of it: drafts that were judged, seconds per request, per token of catch-up."""

    drafter: Drafter
    longest: int
    layers: list[int]
    rates: AcceptanceRates = field(default_factory=AcceptanceRates)
    num_drafts: int = 0
    seconds: float | None = None
    catch_up: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Drafted:
    """What was drafted for a request: by which arm, after how many tokens."""

    arm: int
    start: int
    token_ids: list[int]


class MixtureDrafter:
    """Drafts with the best of several drafters, request by request.

    Args:
        drafters: chains only, each with its longest draft in tokens.
        device: of the target.
    """

    method = "mixture"

    def __init__(self, drafters: Sequence[tuple[Drafter, int]], device: torch.device | str = "cpu") -> None:
        self.feature_layers: tuple[int, ...] = tuple(
            sorted({layer for drafter, _ in drafters for layer in drafter.feature_layers})
        )
        self._arms = [
            _Arm(drafter, longest, [self.feature_layers.index(layer) for layer in drafter.feature_layers])
            for drafter, longest in drafters
        ]
        self._device = device
        self._drafted: dict[str, _Drafted] = {}
        self._left_at: float | None = None
        self._elsewhere: float | None = None  # seconds of a step outside drafting

    @property
    def num_drafts(self) -> list[int]:
        """Drafts of each drafter that were judged so far."""
        return [arm.num_drafts for arm in self._arms]

    @property
    def corrector(self) -> str | None:
        """Those of the drafters that have one."""
        return " + ".join(arm.drafter.corrector for arm in self._arms if arm.drafter.corrector is not None) or None

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """As many as every drafter can go on from."""
        return min(arm.drafter.num_reusable(block_table, block_hashes) for arm in self._arms)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        entered = perf_counter()
        if self._left_at is not None:
            self._elsewhere = _followed(self._elsewhere, entered - self._left_at)
        for request in requests:
            self._judge(request)
        orders = {
            row: self._ranked(request, len(requests))
            for row, request in enumerate(requests)
            if request.max_draft_tokens
        }
        parts: list[Part] = []
        for place in range(len(self._arms)):
            for number in range(len(self._arms)):
                rows = [row for row, order in orders.items() if order[place] == number]
                if not rows:
                    continue
                part = self._drafts_of(number, [requests[row] for row in rows])
                lengths = part.lengths.tolist()
                made = [index for index, length in enumerate(lengths) if length]
                if made:
                    parts.append(([rows[index] for index in made], _picked(part, made)))
                for index in made:
                    row = rows[index]
                    ids = part.token_ids[index, : lengths[index]].tolist()
                    self._drafted[requests[row].request_id] = _Drafted(number, len(requests[row].token_ids), ids)
                    del orders[row]
        self._left_at = perf_counter()
        return merged(parts, len(requests), self._device)

    def _judge(self, request: DraftRequest) -> None:
        """Learns from what became of a request's last draft.

        Of a draft that was cut, the next token counts by whether it is the one that came.
        """
        drafted = self._drafted.pop(request.request_id, None)
        if drafted is None:
            return
        outcomes: list[float] = []
        for guess, token in zip(drafted.token_ids, request.token_ids[drafted.start :], strict=False):
            outcomes.append(float(guess == token))
            if guess != token:
                break
        arm = self._arms[drafted.arm]
        arm.rates.record(request.request_id, outcomes)
        arm.num_drafts += bool(outcomes)

    def _ranked(self, request: DraftRequest, batch: int) -> list[int]:
        """The arms in the order in which a request asks them."""
        total = sum(arm.num_drafts for arm in self._arms)
        elsewhere = (self._elsewhere or 0.0) / batch

        def worth(number: int) -> float:
            arm = self._arms[number]
            if arm.num_drafts == 0 or arm.seconds is None:
                return math.inf
            depth = min(arm.longest, request.max_draft_tokens)
            tokens = 1 + float(arm.rates.rates(request.request_id, depth).cumprod().sum())
            tokens += EXPLORATION * math.sqrt(math.log(1 + total) / arm.num_drafts)
            missed = len(request.token_ids) - arm.seen.get(request.request_id, 0)
            seconds = elsewhere + arm.seconds + arm.catch_up * missed / SPREAD
            return tokens / max(seconds, 1e-9)

        return sorted(range(len(self._arms)), key=lambda number: -worth(number))

    def _drafts_of(self, number: int, requests: Sequence[DraftRequest]) -> DraftProposal:
        """One arm's drafts, timed, with a confidence for each token: its own, or what became of its earlier ones."""
        arm = self._arms[number]
        asked = [replace(request, max_draft_tokens=min(arm.longest, request.max_draft_tokens)) for request in requests]
        begin = perf_counter()
        proposal = arm.drafter.propose(asked)
        some = bool(proposal.lengths.sum() > 0)
        self._note_seconds(arm, requests, perf_counter() - begin, some)
        width = proposal.token_ids.shape[1]
        if proposal.confidence is None:
            rates = arm.rates.all_rates([request.request_id for request in requests], width)
            confidence = torch.from_numpy(rates).to(proposal.token_ids.device)
            proposal = replace(proposal, confidence=confidence)
        return proposal

    def _note_seconds(self, arm: _Arm, requests: Sequence[DraftRequest], seconds: float, some: bool) -> None:
        missed = sum(len(each.token_ids) - arm.seen.get(each.request_id, 0) for each in requests)
        share = seconds / len(requests)
        if arm.seconds is not None and missed > 4 * (arm.longest + 1) * len(requests):
            arm.catch_up = _followed(arm.catch_up, max(0.0, seconds - arm.seconds * len(requests)) / missed)
        elif some or arm.seconds is None:
            arm.seconds = _followed(arm.seconds, share)
        for request in requests:
            arm.seen[request.request_id] = len(request.token_ids)

    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        for arm in self._arms:
            if arm.layers:
                arm.drafter.observe(observations, [features[layer] for layer in arm.layers])

    def release(self, request_id: str) -> None:
        self._drafted.pop(request_id, None)
        for arm in self._arms:
            arm.drafter.release(request_id)
            arm.rates.release(request_id)
            arm.seen.pop(request_id, None)


def _followed(before: float | None, now: float) -> float:
    """A running estimate; one timing moves it by at most its own size."""
    if before is None:
        return now
    return before + TIME_RATE * (min(now, 2 * before + 1e-6) - before)


def _picked(proposal: DraftProposal, rows: Sequence[int]) -> DraftProposal:
    """Some requests' part of a chain proposal."""
    if len(rows) == len(proposal.lengths):
        return proposal
    index = torch.tensor(rows, device=proposal.token_ids.device)
    chosen = type(proposal.probs)(**{name: value[index] for name, value in vars(proposal.probs).items()})
    confidence = None if proposal.confidence is None else proposal.confidence[index]
    return DraftProposal(proposal.token_ids[index], proposal.lengths[index], chosen, confidence)
