"""Parking: trials cost a share of the time, wait longer after each failure, and cheap ones come first."""

from __future__ import annotations

import pytest

from foredraft.engine.parking import FIRST_WAIT, LONGEST_WAIT, PROBE_SHARE, Parking


def trials(parking: Parking, cost: float, steps: int, succeed: bool = False) -> list[int]:
    """The steps, of one second each, in which the only request is tried."""
    found = []
    for step in range(steps):
        if parking.is_ready("a", step) and parking.trial([(cost, "a")]) == "a":
            parking.tried("a", succeed, step)
            found.append(step)
        parking.earn(1.0)
    return found


def test_trials_cost_no_more_than_their_share() -> None:
    for cost in (0.1, 1.0, 7.0):
        parking = Parking()
        parking.settle("a", False, 0)
        found = trials(parking, cost, 20_000, succeed=True)
        assert 0 < len(found) * cost <= PROBE_SHARE * 20_000


def test_failures_double_the_wait_up_to_a_limit() -> None:
    parking = Parking()
    parking.settle("a", False, 0)
    found = trials(parking, 0.0, 3000)
    waits = [later - earlier for earlier, later in zip(found, found[1:], strict=False)]
    assert found[0] == FIRST_WAIT
    assert waits[:4] == [2 * FIRST_WAIT, 4 * FIRST_WAIT, 8 * FIRST_WAIT, 16 * FIRST_WAIT]
    assert set(waits[-3:]) == {LONGEST_WAIT}


def test_credit_is_not_hoarded() -> None:
    parking = Parking()
    parking.settle("a", False, 0)
    parking.trial([(0.5, "a")])  # names the price
    for _ in range(10_000):
        parking.earn(1.0)
    assert parking.trial([(0.5, "a")]) == "a"
    assert parking.trial([(0.5, "a")]) is None


def test_the_cheapest_request_is_tried() -> None:
    parking = Parking()
    for name in ("dear", "cheap", "waiting"):
        parking.settle(name, False, 0)
    parking.tried("waiting", False, 10)
    assert [parking.is_ready(name, 10) for name in ("dear", "cheap", "waiting")] == [True, True, False]
    assert parking.trial([(0.2, "dear"), (0.0, "cheap")]) == "cheap"


def test_backlog_counts_from_the_last_draft() -> None:
    parking = Parking()
    assert parking.backlog("a", 40) == 40
    parking.caught_up("a", 40)
    assert parking.backlog("a", 47) == 7
    parking.release("a")
    assert parking.backlog("a", 47) == 47


@pytest.mark.parametrize("drafts", [True, False])
def test_settling_is_remembered(drafts: bool) -> None:
    parking = Parking()
    parking.settle("a", drafts, 3)
    assert parking.is_parked("a") == (not drafts)
