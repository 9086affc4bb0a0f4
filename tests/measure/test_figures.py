"""Figures against formulas worked here."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.engine.stats import AcceptanceStats, StepTimes
from foredraft.measure.figures import (
    Round,
    Sample,
    acceptance,
    distribution,
    mode_figures,
    percentile,
    ratio,
    spread,
    step_split,
)

NUMBERS = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(NUMBERS, st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.quantile(values, share)))


def test_distribution() -> None:
    found = distribution([4.0, 1.0, 3.0, 2.0])
    assert found["mean"] == 2.5
    assert found["p50"] == 2.5
    assert found["stdev"] == pytest.approx(math.sqrt(5 / 3))
    assert distribution([7.0])["stdev"] == 0.0
    assert distribution([])["mean"] is None


def test_ratios_are_taken_round_by_round() -> None:
    # The machine was three times slower in the second round, for both; the medians alone would say 1.5.
    found = ratio([2.0, 6.0, 2.0], [1.0, 3.0, 1.0])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)
    assert spread([3.0, 1.0, 2.0]) == spread([1.0, 2.0, 3.0])


def sample(tokens: int, latency: float, ttft: float, prompt: int = 0) -> Sample:
    return Sample(prompt, list(range(tokens)), latency, ttft)


def test_a_modes_figures() -> None:
    rounds = [
        Round(
            [sample(11, 2.0, 1.0), sample(1, 0.5, 0.5)],
            seconds=4.0,
            times=StepTimes(num_steps=12),
            peak_memory=7,
        ),
        Round(
            [sample(11, 4.0, 2.0), sample(1, 0.5, 0.5)],
            seconds=2.0,
            times=StepTimes(num_steps=12),
            peak_memory=9,
        ),
    ]
    found = mode_figures(rounds)
    assert found["tokens_per_second"] == pytest.approx((12 / 4 + 12 / 2) / 2)
    assert found["tokens_per_second_range"] == [3.0, 6.0]
    assert found["requests_per_second"] == pytest.approx((2 / 4 + 2 / 2) / 2)
    assert found["latency_s"]["mean"] == pytest.approx(7.0 / 4)
    # A single token has no time per further token.
    assert found["tpot_s"]["mean"] == pytest.approx((0.1 + 0.2) / 2)
    assert found["peak_memory_bytes"] == 9
    assert found["steps"] == 12
    assert rounds[0].latency_per_token == pytest.approx(2.5 / 12)


def test_acceptance_adds_up() -> None:
    left, right = AcceptanceStats(), AcceptanceStats()
    left.record(3, 3, 4)
    right.record(3, 0, 1)
    samples = [Sample(0, [1], 1.0, 1.0, left), Sample(1, [1], 1.0, 1.0, right)]
    found = acceptance([Round(samples[:1]), Round(samples[1:])])
    assert found.mean_acceptance_length == 2.5
    assert found.acceptance_rate_per_position == [0.5, 1.0, 1.0]


def test_the_split_of_a_step() -> None:
    times = StepTimes(num_steps=1, schedule=1.0, draft=2.0, forward=5.0, sample=1.0, commit=1.0)
    split = step_split([Round(times=times), Round(times=times)])
    assert split["forward"] == pytest.approx(0.5)
    assert split["outside_models"] == pytest.approx(0.3)
    assert step_split([Round()]) == {}
