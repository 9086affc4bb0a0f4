"""What a step costs: seconds of the target by tokens in the batch, and seconds of drafting by depth and batch.

Owns the two curves, how they are read between their measured points, and how live timings refresh them. `cost_file`
keeps them, `calibration` measures them; neither requests nor acceptance are known here.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]

OUTLIER = 1.6
"""A timing this many times too long is believed only when several in a row are. One that is too short is believed at
once: what else runs on a machine only ever adds."""

PATIENCE = 5
"""Timings too long in a row after which they are a change and no outliers."""

SCALE_RATE = 0.1
"""How fast a curve's height follows live timings: a longer context or a busier machine moves all of it."""

SHAPE_RATE = 0.04
"""How fast a curve's own points follow in the end. Slower, so that points which no step visits are not left behind; the
first timings at a point count more, as in a mean."""

LONG_BACKLOG = 16
"""Tokens a request may be behind its drafter before catching up is a cost of its own."""


@dataclass
class Curve:
    """Seconds by size: piecewise linear between points, never falling, going on at the last slope.

    Args:
        sizes: ascending.
        seconds: at those sizes, as measured; what is read is the least of a size's and all larger ones', since a point
            that stands above larger ones was disturbed, times the live scale.
    """

    sizes: list[int]
    seconds: list[float]
    log_scale: float = 0.0
    _visits: dict[int, float] = field(default_factory=dict, repr=False)  # live timings by point
    _num_timings: int = 0
    _streak: int = 0
    _table: Seconds | None = field(default=None, repr=False)

    def table(self, largest: int) -> Seconds:
        """Seconds of every size from 0 to `largest`; size 0 costs nothing."""
        if self._table is None or len(self._table) <= largest:
            width = max(largest, self.sizes[-1]) + 1
            heights = np.minimum.accumulate(self.seconds[::-1])[::-1]
            table = np.interp(np.arange(width), self.sizes, heights)
            if width > self.sizes[-1] + 1:
                beyond = np.arange(1, width - self.sizes[-1])
                table[self.sizes[-1] + 1 :] = heights[-1] + beyond * self._last_slope(heights)
            table[0] = 0.0
            self._table = table * math.exp(self.log_scale)
        return self._table[: largest + 1]

    def at(self, size: int) -> float:
        """Seconds of one size."""
        return float(self.table(size)[size])

    def refresh(self, size: int, seconds: float) -> None:
        """Takes one live timing; a lone outlier changes nothing."""
        if size < 1 or seconds <= 0:
            return
        error = math.log(seconds / self.at(size))
        if error > math.log(OUTLIER):
            # A garbage collection or a busy core is over by the next step; a change of load is not.
            self._streak += 1
            if self._streak < PATIENCE:
                return
            error = math.log(OUTLIER)
        else:
            self._streak = 0
        self._num_timings += 1
        moved = max(SCALE_RATE, 1 / self._num_timings) * error
        self.log_scale += moved
        for place, weight in self._neighbours(size):
            visits = self._visits[place] = self._visits.get(place, 1.0) + weight
            self.seconds[place] *= math.exp(max(SHAPE_RATE, 1 / visits) * weight * (error - moved))
        self._table = None

    def _neighbours(self, size: int) -> list[tuple[int, float]]:
        """The points that a size is read from, with their shares."""
        right = bisect_left(self.sizes, size)
        if right == len(self.sizes):
            return [(right - 1, 1.0)]
        if self.sizes[right] == size or right == 0:
            return [(right, 1.0)]
        share = (size - self.sizes[right - 1]) / (self.sizes[right] - self.sizes[right - 1])
        return [(right - 1, 1 - share), (right, share)]

    def _last_slope(self, heights: Seconds) -> float:
        """Seconds per further token past the last point: over the last third of the points, since two alone may lie
        on one step of the kernels; through the origin where there is but one."""
        first = min(len(heights) - 2, len(heights) * 2 // 3)
        if first < 0:
            return float(heights[-1]) / self.sizes[-1]
        slope = (heights[-1] - heights[first]) / (self.sizes[-1] - self.sizes[first])
        return max(float(slope), 0.0)


@dataclass
class CostCurve:
    """The costs of an engine's steps.

    Args:
        target: seconds from the target's forward to its tokens, by tokens in the batch.
        drafts: by draft depth, seconds of drafting by requests that draft; depth 0 costs nothing.
        catch_up: seconds of drafting for each token that a request is behind its drafter.
        rest: seconds of a step outside both models.
    """

    target: Curve
    drafts: dict[int, Curve]
    catch_up: float = 0.0
    rest: float = 0.0

    def step_table(self, largest: int) -> Seconds:
        """Seconds of a step without drafting, by tokens in the batch, 0 to `largest`."""
        return self.target.table(largest) + self.rest

    def draft_seconds(self, depth: int, batch: int) -> float:
        """Seconds of drafting `depth` tokens for each of `batch` requests that are not behind."""
        return float(self.draft_table(depth, batch)[batch])

    def draft_table(self, depth: int, largest: int) -> Seconds:
        """Seconds of drafting `depth` tokens by the number of requests, 0 to `largest`."""
        if depth <= 0 or not self.drafts:
            return np.zeros(largest + 1)
        depths = sorted(self.drafts)
        right = min(bisect_left(depths, depth), len(depths) - 1)
        upper = self.drafts[depths[right]].table(largest)
        if depths[right] == depth or len(depths) == 1:
            return upper
        left = right - 1 if right else 0
        lower = self.drafts[depths[left]].table(largest)
        if right == 0:
            return upper  # shallower than the shallowest measured: at most that
        share = (depth - depths[left]) / (depths[right] - depths[left])
        return np.maximum(lower + share * (upper - lower), lower)

    def refresh(self, *, num_tokens: int, target: float, rest: float) -> None:
        """Takes the timings [s] of one step without prefill."""
        self.target.refresh(num_tokens, target)
        self.rest += SCALE_RATE * (min(rest, 2 * self.rest + target) - self.rest)

    def refresh_drafting(self, depth: int, batch: int, backlog: int, seconds: float) -> None:
        """Takes one timing of drafting; `backlog` is the tokens that its requests were behind in all."""
        if depth < 1 or batch < 1 or not self.drafts:
            return
        if backlog > LONG_BACKLOG * batch:
            excess = max(0.0, seconds - self.draft_seconds(depth, batch)) / backlog
            self.catch_up += SCALE_RATE * (excess - self.catch_up)
            return
        nearest = min(self.drafts, key=lambda known: (abs(known - depth), known))
        # Between measured depths the error is taken relative to what was expected there.
        expected = self.draft_seconds(depth, batch)
        if expected > 0:
            curve = self.drafts[nearest]
            curve.refresh(batch, curve.at(batch) * seconds / expected)


def flat_costs(per_step: float, per_token: float, per_draft: float = 0.0, *, depth: int = 1) -> CostCurve:
    """Costs that are linear: a step, each token of it, and each drafted position; for models without a network."""
    target = Curve([1, 2], [per_step + per_token, per_step + 2 * per_token])
    drafts = {each: Curve([1, 2], [each * per_draft] * 2) for each in range(1, depth + 1)} if per_draft > 0 else {}
    return CostCurve(target, drafts)


def measured_sizes(largest: int) -> Sequence[int]:
    """Token counts at which a curve is measured: dense where a draft decides, and just past the widths of kernels."""
    wanted = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 96, 128, 192, 256, 384, 512]
    return [size for size in wanted if size < largest] + [largest]
