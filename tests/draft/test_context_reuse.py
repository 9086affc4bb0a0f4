"""Drafters on reused blocks: their context is shared with the target's, and they draft what fresh ones would."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draft.test_block import Watched, block_model
from tests.engine.fake import fake_engine, run

from foredraft.draft.block import VIEWS, WAITING_BLOCKS, BlockDrafter
from foredraft.draft.context_blocks import ContextBlocks
from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.kv.hashes import extend_block_hashes
from foredraft.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4
STORY = [5, 17, 80, 3, 44, 9, 2, 61, 7, 30, 12, 1, 55, 100, 4, 8, 90, 33, 21]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)


class CountingModel:
    """A draft model that counts the tokens it is fed."""

    def __init__(self, model) -> None:
        self.model, self.num_tokens = model, 0

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def forward(self, batch, cache, *rest):
        self.num_tokens += len(batch.input_ids)
        return self.model.forward(batch, cache, *rest)


def engine_for(target, drafter, **options):
    return fake_engine(target, drafter, gamma=4, block_size=BLOCK, verification="coupled", **options)


def plain_tokens(target, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    engine, factory = engine_for(target, None, enable_prefix_caching=False)
    return run(engine, factory, [prompt], params)[0].outputs[0].token_ids


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.permutations(range(6)), st.integers(0, 9)),
        max_size=12,
    )
)
def test_the_record_is_what_was_written_last(writes) -> None:
    """Against a cache that keeps the whole text before each slot."""
    record, cache = ContextBlocks(2), {}
    for text, blocks, start in writes:
        hashes: list[bytes] = []
        extend_block_hashes(hashes, text, 2)
        known = record.num_blocks(blocks, hashes)
        for position in range(2 * known):
            assert cache[blocks[position // 2], position % 2] == text[: position + 1]
        # Context from what is known on, then two slots of drafts.
        start = min(start, 2 * known)
        for position in range(start, len(text) + 2):
            held = text[: position + 1] if position < len(text) else None
            cache[blocks[position // 2], position % 2] = held
        record.wrote(blocks, hashes, start, len(text), len(text) + 2)
        assert record.num_blocks(blocks, hashes) == len(text) // 2


def test_a_draft_model_finds_its_own_context_and_feeds_what_it_lacks(target) -> None:
    draft = CountingModel(target)
    drafter = DraftModelDrafter(draft, target.new_cache(64, BLOCK), target.config.vocab_size)
    engine, factory = engine_for(target, drafter)
    run(engine, factory, [STORY], GREEDY)
    fed, prompt = draft.num_tokens, [*STORY[:17], 50]
    (output,) = run(engine, factory, [prompt], SamplingParams(temperature=0.0, max_tokens=3))
    assert output.num_cached_tokens == 16
    assert draft.num_tokens - fed <= 2 + 1 + 4  # the rest of the prompt, the first output token, drafts
    assert output.outputs[0].token_ids == plain_tokens(target, prompt)[:3]
    # A request that does not draft leaves blocks without the draft model's context.
    engine.scheduler.pool.forget()
    other = prompt[::-1]
    (silent,) = factory.assemble({"prompt_token_ids": other}, GREEDY, 0).requests
    engine.add(silent)
    while not silent.finished:
        engine.step()
    fed = draft.num_tokens
    engine.stats.__init__()
    (output,) = run(engine, factory, [other], GREEDY)
    assert output.num_cached_tokens == 16
    assert draft.num_tokens - fed > 16
    assert engine.stats.acceptance_rate == 1.0
    assert engine.stats.num_draft_tokens > 0


@pytest.mark.parametrize("num_blocks", [64, 15])
def test_a_draft_model_on_reused_blocks_drafts_as_a_fresh_one(target, num_blocks: int) -> None:
    """The target drafting for itself is accepted in full, whatever was shared, evicted, overwritten or preempted."""
    drafter = DraftModelDrafter(target, target.new_cache(num_blocks, BLOCK), target.config.vocab_size)
    engine, factory = engine_for(target, drafter, num_blocks=num_blocks, max_num_seqs=3)
    generator = random.Random(num_blocks)
    for _ in range(8):
        prompts = [[*STORY[: generator.randint(1, 19)], generator.randrange(4)] for _ in range(4)]
        gammas = [generator.choice([None, None, 0]) for _ in prompts]
        requests = [
            factory.assemble({"prompt_token_ids": prompt}, GREEDY, gamma).requests[0]
            for prompt, gamma in zip(prompts, gammas, strict=True)
        ]
        for request in requests:
            engine.add(request)
        while engine.scheduler.has_unfinished:
            engine.step()
        for request in requests:
            assert request.stats.num_accepted_tokens == request.stats.num_draft_tokens
    assert engine.scheduler.prefix_stats.num_hit_tokens > 100
    assert engine.stats.num_draft_tokens > 100
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 15)


@pytest.mark.parametrize("num_blocks", [64, 10])
def test_a_block_drafter_on_reused_blocks_drafts_as_a_fresh_one(target, num_blocks: int) -> None:
    """`Watched` compares every draft with one of a drafter that saw the whole text at once, and that there is one."""
    watched = Watched(target, block_model(target, confidence={}), num_blocks)
    engine, factory = engine_for(target, watched, num_blocks=num_blocks, max_num_seqs=3, max_num_batched_tokens=14)
    generator = random.Random(num_blocks)
    params = SamplingParams(temperature=2.0, seed=9, max_tokens=10, allowed_token_ids=[3, 40, 77])
    for _ in range(5):
        prompts = [[*STORY[: generator.randint(1, 19)], generator.randrange(4)] for _ in range(4)]
        outputs = run(engine, factory, prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.outputs[0].token_ids == plain_tokens(target, prompt, params)
    assert engine.scheduler.prefix_stats.num_hit_tokens > 60
    assert watched.num_checked > 50
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 10)


@pytest.mark.parametrize("gamma", [0, None])
def test_a_prompt_of_one_token_of_output_leaves_a_block_drafter_its_context(target, gamma: int | None) -> None:
    """It ends before the drafter was ever asked, and the next one must be able to go on from its blocks."""
    drafter = BlockDrafter(block_model(target), target, 64, BLOCK)
    engine, factory = engine_for(target, drafter)
    (first,) = factory.assemble({"prompt_token_ids": STORY}, SamplingParams(max_tokens=1), gamma).requests
    engine.add(first)
    engine.step()
    assert first.finished
    assert not drafter._contexts
    (output,) = run(engine, factory, [STORY], GREEDY)
    assert output.num_cached_tokens == 16
    assert output.stats.num_draft_tokens > 0
    assert output.outputs[0].token_ids == plain_tokens(target, STORY)


@pytest.mark.parametrize("max_tokens", [3, 6, 14, 40])
def test_an_answer_without_drafts_is_reused_by_the_next_turn(target, max_tokens: int) -> None:
    """Its context waited until the end, in blocks of it that came and went."""
    watched = Watched(target, block_model(target), 64)
    engine, factory = engine_for(target, watched)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    (first,) = factory.assemble({"prompt_token_ids": STORY[:5]}, params, 0).requests
    engine.add(first)
    while not first.finished:
        engine.step()
    assert not watched.inner._contexts
    text = [*first.token_ids, 7, 7]
    (output,) = run(engine, factory, [text], GREEDY)
    assert output.num_cached_tokens == (len(first.token_ids) - 1) // BLOCK * BLOCK
    assert watched.num_checked > 0
    assert output.outputs[0].token_ids == plain_tokens(target, text)


def test_what_waits_for_a_drafter_that_is_not_asked_stays_small(target) -> None:
    """Few rows of a request, and none of a prompt that was computed in the same forward."""
    drafter = BlockDrafter(block_model(target), target, 64, BLOCK)
    engine, factory = engine_for(target, drafter, max_num_batched_tokens=100)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    (first,) = factory.assemble({"prompt_token_ids": STORY[:5]}, params, 0).requests
    engine.add(first)
    most_waiting = 0
    while not first.finished:
        if first.num_output_tokens == 3:
            (long,) = factory.assemble({"prompt_token_ids": STORY * 3}, params, 0).requests
            engine.add(long)
        engine.step()
        context = drafter._contexts.get(first.request_id)
        waiting = [] if context is None else context.pending
        most_waiting = max(most_waiting, sum(map(len, waiting)))
        rows_held = [rows.untyped_storage().nbytes() // rows[0].nbytes for rows in waiting]
        assert max(rows_held, default=0) <= VIEWS
    assert BLOCK < most_waiting < WAITING_BLOCKS * BLOCK
    assert len(long.token_ids) > len(STORY) * 3


def test_blocks_without_a_block_drafters_context_are_not_reused(target) -> None:
    """Their features would never come again, and the request could not draft to its end."""
    first = BlockDrafter(block_model(target), target, 64, BLOCK)
    engine, factory = engine_for(target, first)
    run(engine, factory, [STORY], GREEDY)
    engine.drafter = BlockDrafter(block_model(target), target, 64, BLOCK)  # it has seen nothing
    (output,) = run(engine, factory, [STORY], GREEDY)
    assert output.num_cached_tokens == 0
    assert output.stats.num_draft_tokens > 0
