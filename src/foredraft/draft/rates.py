"""Running acceptance rates: how likely a draft position is to be accepted, given that those before it were.

Counts are forgotten exponentially, each step that is recorded ageing all of a request's positions, so that what was
learned of a deep position long ago does not keep it from being tried again. Few counts are shrunk towards a parent: a
request's position towards its own position before, scaled as positions fall off in the whole engine; the engine's
towards its position before. Knows neither tokens nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Rates = NDArray[np.float64]

REQUEST_MEMORY = 24
ENGINE_MEMORY = 100
"""Steps of one request after which a count weighs 1/e."""

SHRINKAGE = 4.0
"""Observations that a parent's rate counts for."""

PRIOR = 0.7
"""The first position's rate before anything was seen: high, since a draft has to be tried to be judged."""


@dataclass
class Counts:
    """Discounted acceptances and verifications by position [width]."""

    memory: int
    accepted: Rates = field(default_factory=lambda: np.zeros(0))
    verified: Rates = field(default_factory=lambda: np.zeros(0))

    def record(self, outcomes: Sequence[float]) -> None:
        """Adds one step: `outcomes[j]` is how far position j, which was reached, was accepted, in [0, 1]."""
        missing = len(outcomes) - len(self.verified)
        if missing > 0:
            self.accepted = np.concatenate([self.accepted, np.zeros(missing)])
            self.verified = np.concatenate([self.verified, np.zeros(missing)])
        keep = np.exp(-1.0 / self.memory)
        self.accepted *= keep
        self.verified *= keep
        self.accepted[: len(outcomes)] += outcomes
        self.verified[: len(outcomes)] += 1.0

    def at(self, position: int) -> tuple[float, float]:
        """Acceptances and verifications of a position, 0 where none was seen."""
        if position >= len(self.verified):
            return 0.0, 0.0
        return float(self.accepted[position]), float(self.verified[position])


class AcceptanceRates:
    """Rates of an engine and of each of its requests."""

    def __init__(self) -> None:
        self._engine = Counts(ENGINE_MEMORY)
        self._requests: dict[str, Counts] = {}

    def record(self, request_id: str, outcomes: Sequence[float]) -> None:
        """Adds one drafted step of a request.

        Args:
            outcomes: for each position that was reached, 1 when it was accepted, 0 when it was rejected. A position
                that was drafted and cut counts with its predicted probability, so that a cut is no evidence.
        """
        if not outcomes:
            return
        self._engine.record(outcomes)
        counts = self._requests.get(request_id)
        if counts is None:
            counts = self._requests[request_id] = Counts(REQUEST_MEMORY)
        counts.record(outcomes)

    def engine_rates(self, width: int) -> Rates:
        """The engine's conditional acceptance rate at each of `width` positions."""
        rates = np.empty(width)
        parent = PRIOR
        for position in range(width):
            parent = rates[position] = _shrunk(self._engine, position, parent)
        return rates

    def rates(self, request_id: str, width: int) -> Rates:
        """A request's conditional acceptance rate at each of `width` positions."""
        return self.all_rates([request_id], width)[0]

    def all_rates(self, request_ids: Sequence[str], width: int) -> Rates:
        """As `rates`, of several requests [B, width]."""
        engine = self.engine_rates(width)
        result = np.empty((len(request_ids), width))
        # How positions fall off, whatever the request; a stale position's ratio goes back to 1.
        falls = np.minimum(engine[1:] / np.maximum(engine[:-1], 1e-6), 1.0)
        for row, request_id in enumerate(request_ids):
            counts = self._requests.get(request_id)
            if counts is None or width == 0:
                result[row] = engine
                continue
            rate = float(engine[0])
            for position in range(width):
                parent = rate if position == 0 else rate * float(falls[position - 1])
                rate = result[row, position] = _shrunk(counts, position, parent)
        return result

    def release(self, request_id: str) -> None:
        """Forgets a request; what it taught the engine stays."""
        self._requests.pop(request_id, None)


def _shrunk(counts: Counts, position: int, parent: float) -> float:
    accepted, verified = counts.at(position)
    return (accepted + SHRINKAGE * parent) / (verified + SHRINKAGE)
