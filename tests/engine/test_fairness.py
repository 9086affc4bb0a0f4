"""Who goes first, who gives way, and that everybody's turn comes."""

from __future__ import annotations

import pytest
from tests.engine.checks import check_blocks, finish
from tests.engine.fake import FakeModel, OracleDrafter, fake_engine

from foredraft.engine.queue import MAX_OVERTAKEN
from foredraft.errors import OutOfBlocksError, RequestError
from foredraft.sampling.params import SamplingParams

SHORT = SamplingParams(temperature=0.0, max_tokens=2)


def queued(engine, factory, ids, params=SHORT, priority: int = 0):
    (request,) = factory.assemble({"prompt_token_ids": ids}, params, None, priority=priority).requests
    engine.add(request)
    return request


def test_lower_priorities_start_first_and_equal_ones_as_they_came() -> None:
    model = FakeModel(fast=True)
    engine, factory = fake_engine(model, None, max_num_seqs=1)
    requests = [queued(engine, factory, [number], priority=priority) for number, priority in enumerate([2, 0, 1, 0, 2])]
    order = []
    while engine.scheduler.has_unfinished:
        order += [request.token_ids[0] for request in engine.step() if request.finished]
    assert order == [1, 3, 2, 0, 4]
    assert all(request.output_token_ids == model.greedy(request.token_ids[:1], 2) for request in requests)


def test_when_blocks_run_out_the_least_urgent_gives_way_and_then_the_youngest() -> None:
    model = FakeModel(fast=True)
    engine, factory = fake_engine(model, None, num_blocks=10, max_num_seqs=3)
    long = SamplingParams(temperature=0.0, max_tokens=24)
    patient, urgent, second = (
        queued(engine, factory, [number], long, priority) for number, priority in ((1, 5), (2, 0), (3, 0))
    )
    finished, preempted = [], []
    while engine.scheduler.has_unfinished:
        finished += [request for request in engine.step() if request.finished]
        check_blocks(engine)
        if engine.scheduler.num_preemptions > len(preempted):
            preempted.append(next(iter(engine.scheduler.waiting)))
    assert preempted[:2] == [patient, second]
    assert finished == [urgent, second, patient]


@pytest.mark.parametrize("urgent", [0, -(10**9)])
def test_a_stream_of_urgent_requests_passes_the_oldest_only_so_often(urgent: int) -> None:
    model = FakeModel(fast=True)
    engine, factory = fake_engine(model, None, max_num_seqs=1)
    patient = [queued(engine, factory, [1, 2], priority=1) for _ in range(2)]
    done: list[int] = []
    for number in range(400):
        if all(request.finished for request in patient):
            break
        while len(engine.scheduler.waiting) < 5:  # there is always a more urgent one
            queued(engine, factory, [number % 11], priority=urgent)
        done += [patient.index(request) if request in patient else -1 for request in engine.step() if request.finished]
    # Each of the two in its turn, and most starts are still the urgent ones'.
    assert [place for place, who in enumerate(done) if who >= 0] == [MAX_OVERTAKEN, 2 * MAX_OVERTAKEN + 1]


def test_an_overdue_request_is_not_preempted_for_urgent_ones() -> None:
    model = FakeModel(fast=True)
    engine, factory = fake_engine(model, None, max_num_seqs=2, num_blocks=9)
    patient = queued(engine, factory, [1, 2], SamplingParams(temperature=0.0, max_tokens=30), priority=9)
    for number in range(600):
        if patient.finished:
            break
        while len(engine.scheduler.waiting) < 3:
            queued(engine, factory, [number % 11], SamplingParams(temperature=0.0, max_tokens=20))
        engine.step()
        check_blocks(engine)
    assert patient.output_token_ids == model.greedy([1, 2], 30)


def test_nobody_passes_a_big_prompt_that_does_not_fit_yet() -> None:
    model = FakeModel(fast=True)
    engine, factory = fake_engine(model, OracleDrafter(model), num_blocks=16, max_num_seqs=4)
    for number in range(3):
        queued(engine, factory, [number, 1], SamplingParams(temperature=0.0, max_tokens=12))
    engine.step()
    big = queued(engine, factory, [token % 11 for token in range(58)], SHORT)  # fifteen of the sixteen blocks
    for number in range(60):
        if big.finished:
            break
        small = queued(engine, factory, [number % 11], SHORT)
        engine.step()
        check_blocks(engine)
        # A small one whose drafts are accepted starts and ends in one step, so whether it runs now says nothing.
        assert small in engine.scheduler.waiting or big not in engine.scheduler.waiting
    assert big.finished
    finish(engine)


def test_drafts_leave_a_prompt_its_share_of_each_step() -> None:
    """Seven decoding requests could fill every step with drafts."""
    model = FakeModel(fast=True)
    engine, factory = fake_engine(
        model, OracleDrafter(model), gamma=7, max_num_batched_tokens=64, num_blocks=256, max_num_seqs=8
    )
    for number in range(7):
        queued(engine, factory, [number], SamplingParams(temperature=0.0, max_tokens=200))
    engine.step()
    long = queued(engine, factory, [token % 11 for token in range(100)], SHORT)
    for _ in range(100 // (64 // 16) + 2):
        engine.step()
    assert long.finished
    assert max(model.tokens_per_forward) <= 64


def test_cancelling_takes_effect_in_the_next_step() -> None:
    model = FakeModel(fast=True)
    engine, factory = fake_engine(model, OracleDrafter(model), max_num_seqs=2, max_num_batched_tokens=8)
    running, prefilling, waiting = (
        queued(engine, factory, [number, *range(9)], SamplingParams(temperature=0.0, max_tokens=20))
        for number in (1, 2, 3)
    )
    for _ in range(3):
        engine.step()
    assert engine.scheduler.running == [running, prefilling]
    assert 0 < prefilling.num_computed_tokens < 10
    for request in (running, prefilling, waiting):
        engine.abort(request)
        engine.abort(request)  # again does nothing
        check_blocks(engine)
        assert request.finish_reason == "abort"
        assert request.block_table == []
    assert engine.scheduler.pool.num_used == 0
    assert engine.step() == []


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    model = FakeModel()
    engine, factory = fake_engine(model, None, num_blocks=5)
    with pytest.raises(RequestError, match=r"19 tokens and max_tokens 2 need 6 KV-cache blocks of 4.* has 5"):
        queued(engine, factory, [1] * 19)
    (request,) = factory.assemble({"prompt_token_ids": [1] * 18}, SHORT, None).requests
    request.max_tokens = 3
    with pytest.raises(OutOfBlocksError, match=r"grow to 21 tokens and needs 6 KV-cache blocks of 4 tokens.* has 5"):
        engine.add(request)
    assert not engine.scheduler.has_unfinished
    with pytest.raises(Exception, match="priority: 'high' is not an integer"):
        factory.assemble({"prompt_token_ids": [1]}, SHORT, None, priority="high")
