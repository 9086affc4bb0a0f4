"""Cost curves: how they are read, what live timings do to them, and what a cache file may say."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from foredraft.engine.cost_file import cache_directory, file_of, load_costs, save_costs
from foredraft.engine.costs import OUTLIER, PATIENCE, CostCurve, Curve, flat_costs, measured_sizes

KEY = {"model": "m", "device": "cpu", "threads": 2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_curve_is_linear_between_its_points_and_goes_on_at_its_last_slope() -> None:
    curve = Curve([1, 4, 8, 16], [1.0, 1.0, 3.0, 5.0])
    assert curve.table(20) == pytest.approx(
        [
            0,
            1,
            1,
            1,
            1,
            1.5,
            2,
            2.5,
            *(3 + 0.25 * step for step in range(9)),
            *(5 + 0.25 * step for step in range(1, 5)),
        ]
    )


def test_a_curve_never_falls_whatever_was_measured() -> None:
    curve = Curve([1, 2, 3, 4], [2.0, 1.5, 2.5, 2.4])
    assert list(curve.table(4)[1:]) == [1.5, 1.5, 2.4, 2.4]
    assert (np.diff(curve.table(9)) >= 0).all()


def test_one_outlier_changes_nothing_and_several_in_a_row_do() -> None:
    curve = Curve([1, 8], [1.0, 2.0])
    curve.refresh(8, 50.0)
    assert curve.at(8) == 2.0
    for _ in range(PATIENCE):
        curve.refresh(8, 2.0)
        curve.refresh(8, 50.0)
    assert curve.at(8) == pytest.approx(2.0)
    for _ in range(100):
        curve.refresh(8, 4.0)
    assert curve.at(8) == pytest.approx(4.0, rel=0.02)


def test_a_point_that_was_disturbed_when_measured_is_put_right_by_a_few_timings() -> None:
    curve = Curve([1, 2, 8, 16], [1.0, 4.0, 5.0, 5.5])
    for _ in range(50):
        curve.refresh(1, 1.0)
    for _ in range(4):
        curve.refresh(8, 1.2)
    assert curve.at(1) == pytest.approx(1.0, rel=0.25)
    assert curve.at(2) == curve.at(8) == pytest.approx(1.2, rel=0.3)


def test_a_curve_measured_beside_other_work_comes_down_without_bending() -> None:
    curve = Curve([1, 8], [3.0, 6.0])
    for _ in range(30):
        curve.refresh(1, 1.0)
    assert curve.at(1) == pytest.approx(1.0, rel=0.01)
    assert curve.at(8) == pytest.approx(2.0, rel=0.01)


def test_live_timings_move_the_whole_curve_and_bend_it_where_they_are() -> None:
    curve = Curve([1, 4, 8], [1.0, 1.0, 1.0])
    generator = random.Random(0)
    for _ in range(400):
        curve.refresh(8, 1.3 * math.exp(generator.gauss(0, 0.05)))
    assert curve.at(8) == pytest.approx(1.3, rel=0.03)
    assert 1.0 < curve.at(1) < 1.3
    for _ in range(800):
        curve.refresh(1, 1.0 * math.exp(generator.gauss(0, 0.05)))
        curve.refresh(8, 1.3 * math.exp(generator.gauss(0, 0.05)))
    assert curve.at(1) == pytest.approx(1.0, rel=0.05)
    assert curve.at(8) == pytest.approx(1.3, rel=0.05)


def test_drafting_costs_between_measured_depths_and_batches() -> None:
    costs = CostCurve(Curve([1], [1.0]), {1: Curve([1, 3], [1.0, 2.0]), 5: Curve([1, 3], [5.0, 6.0])})
    assert costs.draft_seconds(3, 2) == pytest.approx(3.5)
    assert costs.draft_seconds(0, 2) == 0
    assert costs.draft_seconds(9, 1) == pytest.approx(9.0)


def test_catching_up_is_learned_apart_from_drafting() -> None:
    costs = CostCurve(Curve([1], [1.0]), {4: Curve([1], [2.0])})
    for _ in range(200):
        costs.refresh_drafting(4, 1, 100, 7.0)
    assert costs.catch_up == pytest.approx(0.05, rel=0.01)
    assert costs.draft_seconds(4, 1) == 2.0
    for _ in range(200):
        costs.refresh_drafting(4, 1, 1, 2.0 * (OUTLIER - 0.3))
    assert costs.draft_seconds(4, 1) == pytest.approx(2.6, rel=0.02)


def test_linear_costs_are() -> None:
    costs = flat_costs(3.0, 0.5, 0.25, depth=4)
    assert costs.step_table(9)[1:] == pytest.approx([3 + 0.5 * tokens for tokens in range(1, 10)])
    assert costs.draft_seconds(4, 7) == pytest.approx(1.0)


def test_measured_sizes_end_where_asked() -> None:
    assert list(measured_sizes(1)) == [1]
    assert list(measured_sizes(10))[-2:] == [9, 10]


def test_a_file_gives_back_what_was_saved() -> None:
    assert load_costs(KEY) is None
    costs = CostCurve(Curve([1, 8], [0.25, 0.5], log_scale=math.log(2)), {2: Curve([1], [0.125])}, 0.0625, 0.5)
    save_costs(KEY, costs)
    found = load_costs(KEY)
    assert found is not None
    assert found.step_table(8) == pytest.approx(costs.step_table(8))
    assert found.draft_seconds(2, 1) == 0.125
    assert (found.catch_up, found.rest) == (0.0625, 0.5)
    assert load_costs({**KEY, "threads": 4}) is None
    assert [path.suffix for path in cache_directory().iterdir()] == [".json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda found: "",
        lambda found: "{",
        lambda found: "[]",
        lambda found: "null",
        lambda found: json.dumps({**found, "key": {"model": "other"}}),
        lambda found: json.dumps({**found, "target": {"sizes": [1, 1], "seconds": [1, 2]}}),
        lambda found: json.dumps({**found, "target": {"sizes": [1, 2], "seconds": [1]}}),
        lambda found: json.dumps({**found, "target": {"sizes": [], "seconds": []}}),
        lambda found: json.dumps({**found, "target": {"sizes": [1], "seconds": [-1]}}),
        lambda found: json.dumps({**found, "target": {"sizes": [1], "seconds": [float("nan")]}}),
        lambda found: json.dumps({**found, "drafts": [1]}),
        lambda found: json.dumps({**found, "rest": "x"}),
        lambda found: json.dumps({key: value for key, value in found.items() if key != "catch_up"}),
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_and_rewritten(damage) -> None:
    costs = flat_costs(1.0, 0.1, 0.1, depth=2)
    save_costs(KEY, costs)
    path = file_of(KEY)
    path.write_text(damage(json.loads(path.read_text())))
    assert load_costs(KEY) is None
    save_costs(KEY, costs)
    assert load_costs(KEY) is not None


def test_a_file_of_bytes_that_are_no_text_is_ignored() -> None:
    save_costs(KEY, flat_costs(1.0, 0.1))
    file_of(KEY).write_bytes(b"\xff\xfe\x00{")
    assert load_costs(KEY) is None


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    save_costs(KEY, flat_costs(1.0, 0.1))
    assert load_costs(KEY) is None


def test_a_relative_cache_home_is_no_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "foredraft" / "costs"
