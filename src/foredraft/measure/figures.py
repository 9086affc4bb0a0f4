"""Figures from timings: pure functions of numbers, no engine.

One rule for all of them: a figure of a mode is the median over rounds, beside it the smallest and largest
round, and a ratio of two modes is taken within each round, so that a machine that slows down for a while
slows both sides of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from foredraft.engine.stats import AcceptanceStats, StepTimes


@dataclass(frozen=True)
class Sample:
    """One prompt answered once.

    Args:
        prompt: its index in the file.
        latency, ttft: seconds from arrival to the last and to the first token.
    """

    prompt: int
    token_ids: list[int]
    latency: float
    ttft: float
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats)

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None when there is none."""
        later = len(self.token_ids) - 1
        return (self.latency - self.ttft) / later if later > 0 else None


@dataclass
class Round:
    """One mode over all prompts once; `seconds` is the time spent generating, `peak_memory` in bytes."""

    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    times: StepTimes = field(default_factory=StepTimes)
    peak_memory: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def latency_per_token(self) -> float:
        """Seconds that a request waits per token that it gets."""
        return sum(sample.latency for sample in self.samples) / max(1, self.num_tokens)


@dataclass(frozen=True)
class Spread:
    """A median over rounds with the smallest and the largest round."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The median of at least one value, with the extremes."""
    return Spread(median(values), min(values), max(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The ratio of each round, and its spread."""
    return spread([a / b if b else math.nan for a, b in zip(numerators, denominators, strict=True)])


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated linearly; `share` in 0 to 1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, percentiles and standard deviation over requests; None throughout without values."""
    if not values:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "stdev"))
    return {
        "mean": fmean(values),
        "p50": percentile(values, 0.5),
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
        "stdev": stdev(values) if len(values) > 1 else 0.0,
    }


def mode_figures(rounds: Sequence[Round]) -> dict[str, object]:
    """The figures of one mode, in seconds and bytes; `steps` are the target forwards of one round."""
    samples = [sample for each in rounds for sample in each.samples]
    rates = spread([each.tokens_per_second for each in rounds])
    return {
        "tokens_per_second": rates.median,
        "tokens_per_second_range": [rates.low, rates.high],
        "latency_s": distribution([sample.latency for sample in samples]),
        "ttft_s": distribution([sample.ttft for sample in samples]),
        "tpot_s": distribution([sample.tpot for sample in samples if sample.tpot is not None]),
        "requests_per_second": median(len(each.samples) / each.seconds for each in rounds),
        "peak_memory_bytes": max(each.peak_memory for each in rounds) or None,
        "steps": int(median(each.times.num_steps for each in rounds)),
    }


def acceptance(rounds: Sequence[Round]) -> AcceptanceStats:
    """The acceptance of all requests together."""
    total = AcceptanceStats()
    for each in rounds:
        for sample in each.samples:
            total.add(sample.acceptance)
    return total


def step_split(rounds: Sequence[Round]) -> dict[str, float]:
    """Shares of the steps' time by phase, and `outside_models`: what neither target nor drafter spent."""
    whole = sum(each.times.total for each in rounds)
    if not whole:
        return {}
    phases = ("schedule", "draft", "forward", "sample", "commit")
    shares = {phase: sum(getattr(each.times, phase) for each in rounds) / whole for phase in phases}
    shares["outside_models"] = sum(each.times.outside_models for each in rounds) / whole
    return shares
