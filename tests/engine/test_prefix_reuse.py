"""What requests share: full committed blocks, by the text up to their end, and never at the cost of a token."""

from __future__ import annotations

import pytest
from tests.engine.checks import Historian, check_blocks, finish, guard_writes, preempt
from tests.engine.fake import FakeModel, OracleDrafter, fake_engine, run

from foredraft.sampling.params import SamplingParams

BLOCK = 4
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3]
GREEDY = SamplingParams(temperature=0.0, max_tokens=9)


def queued(engine, factory, ids, params=GREEDY, **options):
    """Queues one prompt; its requests."""
    requests = factory.assemble({"prompt_token_ids": ids}, params, None, **options).requests
    for request in requests:
        engine.add(request)
    return requests


@pytest.mark.parametrize(("common", "expected"), [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (11, 8), (12, 12), (13, 12)])
def test_a_prompt_computes_only_what_comes_after_the_last_common_full_block(common: int, expected: int) -> None:
    model = Historian()
    engine, factory = fake_engine(model, None)
    guard_writes(engine)
    run(engine, factory, [TEXT], GREEDY)
    other = TEXT[:common] + [(token + 1) % 11 for token in TEXT[common:]]
    before = len(model.tokens_per_forward)
    (output,) = run(engine, factory, [other], GREEDY)
    assert output.num_cached_tokens == expected
    assert model.tokens_per_forward[before] == len(TEXT) - expected
    assert output.outputs[0].token_ids == model.greedy(other, 9)
    stats = engine.scheduler.prefix_stats
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (2 * len(TEXT), expected)


@pytest.mark.parametrize("length", [4, 5, 8, 12])
def test_the_last_token_is_always_computed(length: int) -> None:
    model = Historian()
    engine, factory = fake_engine(model, None)
    run(engine, factory, [TEXT[:length]], GREEDY)
    (output,) = run(engine, factory, [TEXT[:length]], GREEDY)
    assert output.num_cached_tokens == (length - 1) // BLOCK * BLOCK
    assert output.outputs[0].token_ids == model.greedy(TEXT[:length], 9)


@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3])
def test_output_is_reused_and_rejected_drafts_never_are(wrong_every: int) -> None:
    """A conversation: each turn's prompt is all that came before. Blocks that ever held a rejected draft hold the text
    by the time that they are found."""
    model = Historian()
    engine, factory = fake_engine(model, OracleDrafter(model, wrong_every), gamma=6)
    guard_writes(engine)
    text = TEXT[:5]
    for turn in range(5):
        (output,) = run(engine, factory, [text], SamplingParams(temperature=0.0, max_tokens=11))
        assert output.outputs[0].token_ids == model.greedy(text, 11)
        # Its last token was never fed, so the block that it ends is not full of keys and values.
        assert output.num_cached_tokens == ((len(text) - 2) // BLOCK * BLOCK if turn else 0)
        text = text + output.outputs[0].token_ids + [turn]
        rejected = model.greedy(text[:7], 4)[::-1]
        (other,) = run(engine, factory, [text[:7] + rejected], GREEDY)
        assert other.outputs[0].token_ids == model.greedy(text[:7] + rejected, 9)


def test_samples_of_a_prompt_compute_it_once() -> None:
    model = Historian()
    engine, factory = fake_engine(model, OracleDrafter(model), max_num_batched_tokens=256)
    guard_writes(engine)
    (output,) = run(engine, factory, [TEXT], SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=9))
    assert model.tokens_per_forward[0] == len(TEXT)
    assert engine.scheduler.prefix_stats.num_hit_tokens == 4 * 12
    assert len({tuple(each.token_ids) for each in output.outputs}) > 1
    plain, plain_factory = fake_engine(Historian(), None, enable_prefix_caching=False)
    for index, completion in enumerate(output.outputs):
        params = SamplingParams(temperature=1.0, seed=3 + index, max_tokens=9)
        assert run(plain, plain_factory, [TEXT], params)[0].outputs[0].token_ids == completion.token_ids
    assert plain.scheduler.prefix_stats.num_queried_tokens == 0


def test_samples_hold_the_same_blocks_while_they_run() -> None:
    model = FakeModel()
    engine, factory = fake_engine(model, None, max_num_batched_tokens=5, max_num_seqs=4)
    requests = queued(engine, factory, TEXT, SamplingParams(n=4, seed=1, max_tokens=30))
    for _ in range(12):
        engine.step()
        check_blocks(engine)
    tables = [request.block_table[:3] for request in requests]
    assert len(tables[0]) == 3
    assert all(table == tables[0] for table in tables)
    assert [engine.scheduler.pool.num_holders(block) for block in tables[0]] == [4, 4, 4]
    engine.abort(requests[0])
    assert [engine.scheduler.pool.num_holders(block) for block in tables[1]] == [3, 3, 3]
    finish(engine)


def test_who_waits_for_a_prompt_that_is_aborted_computes_it_itself() -> None:
    model = Historian()
    engine, factory = fake_engine(model, None, max_num_batched_tokens=8, max_num_seqs=4)
    first, second = queued(engine, factory, TEXT, SamplingParams(n=2, temperature=0.0, max_tokens=5))
    engine.step()
    assert [each.num_computed_tokens for each in (first, second)] == [8, 0]
    engine.abort(first)
    finish(engine)
    assert second.output_token_ids == model.greedy(TEXT, 5)
    assert second.num_cached_tokens == 8


def test_prompt_logprobs_are_computed_for_the_whole_prompt() -> None:
    model = FakeModel()
    engine, factory = fake_engine(model, None)
    params = SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=2)
    (alone,) = run(engine, factory, [TEXT], params)
    (again,) = run(engine, factory, [TEXT], params)
    assert again.num_cached_tokens == 0
    assert len(again.prompt_logprobs) == len(TEXT)
    assert again.prompt_logprobs == alone.prompt_logprobs
    assert engine.scheduler.prefix_stats.num_queried_tokens == 0
    (other,) = run(engine, factory, [TEXT], GREEDY)
    assert other.num_cached_tokens == 12, "what such a request computed is there for others"


def test_a_preempted_request_comes_back_to_its_own_blocks() -> None:
    model = Historian()
    engine, factory = fake_engine(model, OracleDrafter(model, 2))
    guard_writes(engine)
    (request,) = queued(engine, factory, TEXT, SamplingParams(temperature=0.0, max_tokens=20))
    for _ in range(4):
        engine.step()
    computed = request.num_computed_tokens
    assert computed > len(TEXT)
    preempt(engine, request)
    check_blocks(engine)
    before = len(model.tokens_per_forward)
    engine.step()
    assert model.tokens_per_forward[before] <= computed % BLOCK + 1 + 4  # what no full block held, and drafts
    finish(engine)
    assert request.output_token_ids == model.greedy(TEXT, 20)
    assert request.num_cached_tokens == 0


def test_a_request_that_failed_publishes_nothing_of_its_last_step() -> None:
    model = FakeModel(vocab_size=64, seed=5)
    prompt = [1, 2, 3, 4, 5]
    model.nan_after = prompt[-1]
    engine, factory = fake_engine(model, None)
    (bad,) = run(engine, factory, [prompt], GREEDY)
    assert bad.error is not None
    model.nan_after = None
    (good,) = run(engine, factory, [prompt], GREEDY)
    assert good.num_cached_tokens == 0
    assert good.outputs[0].token_ids == model.greedy(prompt, 9)


def test_forgetting_makes_the_next_request_compute_everything() -> None:
    model = Historian()
    engine, factory = fake_engine(model, None)
    run(engine, factory, [TEXT], GREEDY)
    engine.scheduler.pool.forget()
    assert run(engine, factory, [TEXT], GREEDY)[0].num_cached_tokens == 0
