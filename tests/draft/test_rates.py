"""Running acceptance rates: what they converge to, what they borrow, and what they forget."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foredraft.draft.rates import PRIOR, SHRINKAGE, AcceptanceRates


def feed(rates: AcceptanceRates, request: str, truth: list[float], steps: int, seed: int = 0) -> None:
    """Steps whose positions are accepted with the probabilities `truth`, left to right."""
    generator = random.Random(seed)
    for _ in range(steps):
        outcomes: list[float] = []
        for rate in truth:
            outcomes.append(float(generator.random() < rate))
            if not outcomes[-1]:
                break
        rates.record(request, outcomes)


def test_before_anything_is_seen_every_position_has_the_prior() -> None:
    assert AcceptanceRates().rates("a", 3) == pytest.approx([PRIOR] * 3)


def test_one_observation_is_shrunk_as_the_formula_says() -> None:
    rates = AcceptanceRates()
    rates.record("a", [1.0, 0.0])
    engine = [(1 + SHRINKAGE * PRIOR) / (1 + SHRINKAGE)]
    engine.append(SHRINKAGE * engine[0] / (1 + SHRINKAGE))
    assert rates.rates("new", 2) == pytest.approx(engine)
    own = [(1 + SHRINKAGE * engine[0]) / (1 + SHRINKAGE)]
    own.append(SHRINKAGE * own[0] * engine[1] / engine[0] / (1 + SHRINKAGE))
    assert rates.rates("a", 2) == pytest.approx(own)


def test_rates_approach_the_truth_of_each_request() -> None:
    rates = AcceptanceRates()
    averaged = {"good": np.zeros(3), "bad": np.zeros(3)}
    truths = {"good": [0.95, 0.9, 0.85], "bad": [0.3, 0.2, 0.1]}
    for step in range(400):
        for name, truth in truths.items():
            feed(rates, name, truth, 1, seed=step * 7 + len(name))
            averaged[name] += rates.rates(name, 3) / 400
    assert averaged["good"] == pytest.approx(truths["good"], abs=0.08)
    assert averaged["bad"][0] == pytest.approx(0.35, abs=0.08)  # shrunk towards the engine's
    assert averaged["good"][0] > 2 * averaged["bad"][0]


def test_a_position_not_tried_for_long_is_judged_by_the_one_before_it() -> None:
    rates = AcceptanceRates()
    feed(rates, "a", [0.9, 0.0], 100)
    assert rates.rates("a", 2)[1] < 0.2
    for _ in range(1000):
        rates.record("a", [1.0])
    assert rates.rates("a", 2)[1] > 0.9


def test_a_change_is_noticed_within_a_request_memory() -> None:
    rates = AcceptanceRates()
    feed(rates, "a", [1.0], 300)
    assert rates.rates("a", 1)[0] > 0.97
    feed(rates, "a", [0.0], 40)
    assert rates.rates("a", 1)[0] < 0.35


def test_a_released_request_leaves_only_what_it_taught_the_engine() -> None:
    rates = AcceptanceRates()
    feed(rates, "a", [0.0], 300)
    rates.release("a")
    assert rates.rates("a", 2) == pytest.approx(rates.engine_rates(2))
    assert rates.engine_rates(1)[0] < 0.1
