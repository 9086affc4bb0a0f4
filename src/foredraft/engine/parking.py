"""Requests that do not draft for now: when they are tried again, and whether coming back is worth its cost.

A parked request comes back when its rates pay with something to spare, so that it does not flap between on and off.
Its rates change only when it is tried, so now and then one is: trials of all requests together may cost a small share
of the time, and a request that fails waits longer each time. Knows rates' consequences, not rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAUTION = 0.9
"""What a parked request's expected tokens count for: it returns when they pay for themselves and a tenth more."""

PROBE_SHARE = 0.01
"""Share of the time that trials may take."""

FIRST_WAIT, LONGEST_WAIT = 4, 256
"""Steps between two trials of a request: doubled by each that fails."""

HORIZON = 64
"""Steps that a request is trusted to go on for when its catch-up is weighed; `max_tokens` is often never reached."""


@dataclass
class Standing:
    """Where a request stands: tokens that its drafter has seen, whether it is parked, and its next trial."""

    num_seen: int = 0
    parked: bool = False
    wait: int = FIRST_WAIT
    next_trial: int = 0


class Parking:
    """The standing of all requests, and the seconds that may be spent on trials."""

    def __init__(self) -> None:
        self._standings: dict[str, Standing] = {}
        self._credit = 0.0
        self._price = 0.0

    @property
    def num_parked(self) -> int:
        """Requests that are parked now."""
        return sum(standing.parked for standing in list(self._standings.values()))

    def is_parked(self, request_id: str) -> bool:
        """Whether a request is parked now."""
        return self._standing(request_id).parked

    def backlog(self, request_id: str, num_tokens: int) -> int:
        """Tokens of a text of `num_tokens` that the request's drafter has not seen."""
        return max(0, num_tokens - self._standing(request_id).num_seen)

    def settle(self, request_id: str, drafts: bool, step: int) -> None:
        """Notes whether a request is to draft."""
        standing = self._standing(request_id)
        if drafts:
            standing.parked, standing.wait = False, FIRST_WAIT
        elif not standing.parked:
            standing.parked, standing.next_trial = True, step + standing.wait

    def caught_up(self, request_id: str, num_tokens: int) -> None:
        """Notes that the request's drafter has seen its text."""
        self._standing(request_id).num_seen = num_tokens

    def earn(self, seconds: float) -> None:
        """A step took `seconds`: a share of them may go into trials, no more in hand than the next one costs."""
        self._credit = min(self._credit + PROBE_SHARE * seconds, self._price)

    def is_ready(self, request_id: str, step: int) -> bool:
        """Whether a parked request's wait is over."""
        return self._standing(request_id).next_trial <= step

    def trial(self, costs: Sequence[tuple[float, str]]) -> str | None:
        """The request to try in this step: the cheapest of the ready ones, if there is credit for it.

        Args:
            costs: seconds that trying each ready request would add, and its id.
        """
        if not costs:
            return None
        seconds, request_id = min(costs)
        self._price = seconds
        if seconds > self._credit:
            return None
        self._credit -= seconds
        return request_id

    def tried(self, request_id: str, succeeded: bool, step: int) -> None:
        """Notes how a trial ended."""
        standing = self._standing(request_id)
        standing.wait = FIRST_WAIT if succeeded else min(2 * standing.wait, LONGEST_WAIT)
        standing.next_trial = step + (1 if succeeded else standing.wait)

    def release(self, request_id: str) -> None:
        """Forgets a request."""
        self._standings.pop(request_id, None)

    def _standing(self, request_id: str) -> Standing:
        return self._standings.setdefault(request_id, Standing())
