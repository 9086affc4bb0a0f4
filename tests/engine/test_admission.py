"""Admission against brute force, and what the cut may not know."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from foredraft.engine.admission import best_lengths, cut_lengths


def random_reach(generator: random.Random, batch: int, width: int) -> np.ndarray:
    rates = np.array([[generator.random() ** 0.5 for _ in range(width)] for _ in range(batch)])
    reach = rates.cumprod(-1)
    for row in range(batch):
        reach[row, generator.randint(0, width) :] = 0.0
    return reach


def curves(generator: random.Random, size: int) -> list[np.ndarray]:
    """Step costs by draft tokens: flat, linear, concave, steep, and with steps as kernels have them."""
    counts = np.arange(size + 1)
    return [
        np.full(size + 1, 1.0),
        1 + generator.random() * counts,
        1 + np.sqrt(counts) * generator.random(),
        1 + 0.3 * counts**1.5,
        1 + 0.5 * np.ceil(counts / 4),
        1 + 0.9 * np.ceil((counts + generator.randint(0, 3)) / 4) + 0.01 * counts,
    ]


def worth(reach: np.ndarray, lengths, draft_seconds, step_seconds) -> float:
    tokens = len(reach) + sum(row[:length].sum() for row, length in zip(reach, lengths, strict=True))
    drafting = sum(length > 0 for length in lengths)
    return float(tokens / (step_seconds[sum(lengths)] + draft_seconds[max(lengths)][drafting]))


@pytest.mark.parametrize("seed", range(30))
def test_lengths_before_drafting_are_the_best_of_all(seed: int) -> None:
    generator = random.Random(seed)
    batch, width = generator.randint(1, 3), generator.randint(1, 4)
    for step_seconds in curves(generator, batch * width):
        reach = random_reach(generator, batch, width)
        per_depth = generator.random() * 0.3
        draft_seconds = [np.full(batch + 1, per_depth * depth) for depth in range(width + 1)]
        chosen = best_lengths(reach, draft_seconds, step_seconds)
        found = worth(reach, chosen, draft_seconds, step_seconds)
        best = max(
            worth(reach, lengths, draft_seconds, step_seconds)
            for lengths in itertools.product(range(width + 1), repeat=batch)
        )
        assert found == pytest.approx(best)
        assert all(reach[row, :length].all() for row, length in enumerate(chosen))


@pytest.mark.parametrize("seed", range(30))
def test_lengths_are_near_the_best_where_drafting_grows_with_the_batch(seed: int) -> None:
    generator = random.Random(seed)
    batch, width = 3, 3
    for step_seconds in curves(generator, batch * width):
        reach = random_reach(generator, batch, width)
        draft_seconds = [depth * (0.05 + 0.02 * np.arange(batch + 1)) for depth in range(width + 1)]
        found = worth(reach, best_lengths(reach, draft_seconds, step_seconds), draft_seconds, step_seconds)
        best = max(
            worth(reach, lengths, draft_seconds, step_seconds)
            for lengths in itertools.product(range(width + 1), repeat=batch)
        )
        assert found >= 0.97 * best


def test_a_draft_that_cannot_come_true_is_not_made() -> None:
    free = [np.zeros(2)] * 4
    assert best_lengths(np.zeros((1, 3)), free, np.ones(4)) == [0]
    assert best_lengths(np.array([[0.5, 0.0, 0.0]]), free, np.ones(4)) == [1]


def test_a_steep_curve_shortens_drafts() -> None:
    """As where each further token wakes further experts."""
    reach = np.full((2, 6), 0.8).cumprod(-1)
    free = [np.zeros(3)] * 7
    counts = np.arange(13)
    sums = [sum(best_lengths(reach, free, 1 + slope * counts)) for slope in (0.0, 0.1, 0.3, 1.0)]
    assert sums[0] == 12
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] == 0


def cut(confidence, predicted=None, foreseen=None, drafted=0.0, seconds=None, lengths=None) -> list[int]:
    confidence = np.array(confidence, dtype=float)
    batch, width = confidence.shape
    return cut_lengths(
        confidence,
        lengths or [width] * batch,
        confidence if predicted is None else np.array(predicted, dtype=float),
        foreseen or [False] * batch,
        drafted,
        np.ones(batch * width + 1) if seconds is None else np.asarray(seconds, dtype=float),
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_the_best_of_all_where_everything_may_be_foreseen(seed: int) -> None:
    generator = random.Random(seed)
    batch, width = generator.randint(1, 3), generator.randint(1, 4)
    for step_seconds in curves(generator, batch * width):
        confidence = np.array([[generator.random() ** 0.5 for _ in range(width)] for _ in range(batch)])
        reach = confidence.cumprod(-1)
        drafted = generator.random()
        nothing = [np.full(batch + 1, drafted)] * (width + 1)
        chosen = cut(confidence, foreseen=[True] * batch, drafted=drafted, seconds=step_seconds)
        best = max(
            worth(reach, lengths, nothing, step_seconds)
            for lengths in itertools.product(range(width + 1), repeat=batch)
        )
        assert worth(reach, chosen, nothing, step_seconds) == pytest.approx(best)


def test_a_fall_is_walked_through_when_the_curve_is_flat_behind_it() -> None:
    seconds = [1.0, 2.0, 2.0, 2.0, 2.0]
    assert cut([[0.9, 0.9, 0.9, 0.9]], seconds=seconds) == [4]
    assert cut([[0.9, 0.9, 0.9, 0.9]], predicted=[[0.1] * 4], seconds=seconds) == [0]


def test_what_is_not_known_yet_cannot_undo_what_was_admitted() -> None:
    """The prediction led past the fall; the confidences met there are worse, and the walk ends where they are."""
    seconds = [1.0, 2.0, 2.0, 2.0, 2.0]
    assert cut([[0.9, 0.9, 0.0, 0.9]], predicted=[[0.9] * 4], seconds=seconds) == [2]


@pytest.mark.parametrize("seed", range(40))
def test_a_cut_at_j_does_not_depend_on_confidences_after_j(seed: int) -> None:
    """Whatever follows the first token that is cut, the cut stays: the stopping rule's definition."""
    generator = random.Random(seed)
    batch, width = 3, 5
    for step_seconds in curves(generator, batch * width):
        confidence = np.array([[generator.random() ** 0.4 for _ in range(width)] for _ in range(batch)])
        predicted = np.array([[generator.random() ** 0.4 for _ in range(width)] for _ in range(batch)])
        chosen = cut(confidence, predicted=predicted, seconds=step_seconds)
        for _ in range(20):
            changed = confidence.copy()
            for row, length in enumerate(chosen):
                changed[row, length + 1 :] = [generator.random() for _ in range(width - length - 1)]
            assert cut(changed, predicted=predicted, seconds=step_seconds) == chosen


def test_ragged_drafts_and_none_at_all() -> None:
    assert cut([[0.9, 0.9], [0.9, 0.9]], lengths=[0, 1]) == [0, 1]
    assert cut([[0.9], [0.8]], lengths=[0, 0]) == [0, 0]
    assert cut([[0.0, 0.9]]) == [0]
