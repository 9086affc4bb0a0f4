"""The engine's step against a target that is defined by a table: tokens, rollback, stops, preemption, statistics."""

from __future__ import annotations

import random

import pytest
from tests.engine.fake import ByteTokenizer, FakeModel, OracleDrafter, fake_engine, run

from foredraft.draft.ngram import NgramDrafter
from foredraft.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=26)


def prompts_of(model: FakeModel, count: int, seed: int = 3) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(model.config.vocab_size) for _ in range(generator.randint(1, 30))] for _ in range(count)
    ]


@pytest.mark.parametrize("gamma", [1, 3, 5, 8])
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3, 5])
def test_greedy_tokens_are_the_definitions(gamma: int, wrong_every: int) -> None:
    model = FakeModel()
    prompts = prompts_of(model, 6)
    engine, factory = fake_engine(model, OracleDrafter(model, wrong_every), gamma=gamma)
    outputs = run(engine, factory, prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == model.greedy(prompt, 26)
        assert output.stats.num_draft_tokens > 0
    assert engine.scheduler.pool.num_used == 0


@pytest.mark.parametrize("gamma", [1, 4, 7])
def test_oracle_reaches_gamma_plus_one(gamma: int) -> None:
    model = FakeModel()
    engine, factory = fake_engine(model, OracleDrafter(model), gamma=gamma)
    params = SamplingParams(temperature=0.0, max_tokens=1 + 4 * (gamma + 1))  # the prefill's token, then whole blocks
    (output,) = run(engine, factory, [[1, 2, 3]], params)
    assert output.stats.mean_acceptance_length == gamma + 1
    assert output.stats.acceptance_rate == 1.0
    assert output.stats.acceptance_rate_per_position == [1.0] * gamma
    assert output.outputs[0].origins == "t" + ("a" * gamma + "b") * 4


def test_always_wrong_drafts_give_one_token_a_step() -> None:
    model = FakeModel()
    engine, factory = fake_engine(model, OracleDrafter(model, wrong_every=1), gamma=4)
    (output,) = run(engine, factory, [[1, 2, 3]], GREEDY)
    assert output.stats.mean_acceptance_length == 1.0
    assert output.stats.num_accepted_tokens == 0
    assert output.stats.num_draft_tokens > 0
    assert set(output.outputs[0].origins) == {"t", "r"}  # no draft fits before the last token


@pytest.mark.parametrize("budget", [8, 11, 64])
@pytest.mark.parametrize("num_blocks", [15, 20, 200])
def test_tokens_survive_preemption_and_chunked_prefill(budget: int, num_blocks: int) -> None:
    model = FakeModel()
    prompts = prompts_of(model, 8, seed=budget + num_blocks)
    engine, factory = fake_engine(
        model, OracleDrafter(model, wrong_every=3), num_blocks=num_blocks, max_num_batched_tokens=budget
    )
    outputs = run(engine, factory, prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [model.greedy(prompt, 26) for prompt in prompts]
    assert max(model.tokens_per_forward) <= budget
    assert engine.scheduler.pool.num_used == 0
    if num_blocks != 20:
        assert (engine.scheduler.num_preemptions > 0) == (num_blocks < 20)


def test_ngram_drafts_come_true_on_repeating_text() -> None:
    model = FakeModel(vocab_size=4)  # sixteen contexts at most: greedy output soon repeats
    engine, factory = fake_engine(model, NgramDrafter(), gamma=5)
    (output,) = run(engine, factory, [[0, 1]], SamplingParams(temperature=0.0, max_tokens=120))
    assert output.outputs[0].token_ids == model.greedy([0, 1], 120)
    assert output.stats.mean_acceptance_length > 3


@pytest.mark.parametrize("position", range(1, 14))
def test_stop_id_inside_an_accepted_block_ends_the_request_there(position: int) -> None:
    model = FakeModel(vocab_size=64, seed=5)
    expected = model.greedy([1, 2], 30)
    stop = expected[position]
    engine, factory = fake_engine(model, OracleDrafter(model), gamma=6)
    params = SamplingParams(temperature=0.0, max_tokens=30, stop_token_ids=[stop])
    (output,) = run(engine, factory, [[1, 2]], params)
    first = expected.index(stop)
    assert output.outputs[0].token_ids == expected[: first + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert engine.scheduler.pool.num_used == 0


def test_eos_ends_and_ignore_eos_does_not() -> None:
    model = FakeModel(vocab_size=64, seed=5)
    expected = model.greedy([1, 2], 30)
    eos = expected[9]
    engine, factory = fake_engine(model, OracleDrafter(model), gamma=6, eos_token_ids=[eos])
    ending, going_on = run(
        engine,
        factory,
        [[1, 2], [1, 2]],
        [
            SamplingParams(temperature=0.0, max_tokens=30),
            SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
        ],
    )
    assert ending.outputs[0].token_ids == expected[: expected.index(eos) + 1]
    assert ending.outputs[0].stop_reason is None
    assert going_on.outputs[0].token_ids == expected
    assert going_on.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_length_limit_is_exact(max_tokens: int) -> None:
    model = FakeModel()
    engine, factory = fake_engine(model, OracleDrafter(model), gamma=6)
    (output,) = run(engine, factory, [[1, 2]], SamplingParams(temperature=0.0, max_tokens=max_tokens))
    assert output.outputs[0].token_ids == model.greedy([1, 2], max_tokens)
    assert output.outputs[0].finish_reason == "length"


def test_context_end_is_exact() -> None:
    model = FakeModel(max_model_len=32)
    engine, factory = fake_engine(model, OracleDrafter(model), gamma=6)
    (output,) = run(engine, factory, [[1, 2]], SamplingParams(temperature=0.0, max_tokens=None))
    assert output.outputs[0].token_ids == model.greedy([1, 2], 30)


@pytest.mark.parametrize("gamma", [0, 1, 3, 6])
def test_stop_string_inside_an_accepted_block_cuts_text_and_tokens(gamma: int) -> None:
    model = FakeModel(vocab_size=128, seed=9)
    expected = model.greedy([65, 66], 40)
    text = bytes(expected).decode()
    stop = text[11:14]
    drafter = OracleDrafter(model) if gamma else None
    engine, factory = fake_engine(model, drafter, gamma=gamma, tokenizer=ByteTokenizer())
    (output,) = run(engine, factory, [[65, 66]], SamplingParams(temperature=0.0, max_tokens=40, stop=[stop]))
    end = text.index(stop)
    assert output.outputs[0].text == text[:end]
    assert output.outputs[0].token_ids == expected[: end + 3]
    assert output.outputs[0].stop_reason == stop


def test_nan_logits_fail_their_request_alone() -> None:
    model = FakeModel(vocab_size=64, seed=5)
    bad_prompt, good_prompt = [1, 2], [9, 8]
    model.nan_after = model.greedy(bad_prompt, 6)[5]
    good = model.greedy(good_prompt, 5)
    assert model.nan_after not in good_prompt + good
    engine, factory = fake_engine(model, OracleDrafter(model), gamma=3)
    bad, neighbour = run(
        engine, factory, [bad_prompt, good_prompt], [GREEDY, SamplingParams(temperature=0.0, max_tokens=5)]
    )
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "NaN" in bad.error
    assert neighbour.outputs[0].token_ids == good
    assert engine.scheduler.pool.num_used == 0


def test_seeded_tokens_depend_on_nothing_but_the_seed() -> None:
    model = FakeModel(sharpness=1.0)
    params = SamplingParams(temperature=1.0, max_tokens=26, seed=11)
    alone, factory = fake_engine(model, None)
    expected = run(alone, factory, [[1, 2, 3]], params)[0].outputs[0].token_ids
    for drafter, gamma in [(OracleDrafter(model), 4), (NgramDrafter(1, 3), 7), (OracleDrafter(model, 2), 1)]:
        engine, factory = fake_engine(model, drafter, gamma=gamma)
        mates = prompts_of(model, 4)
        listed = [SamplingParams(temperature=0.7, max_tokens=9), params, GREEDY, SamplingParams(seed=1), GREEDY]
        outputs = run(engine, factory, [mates[0], [1, 2, 3], *mates[1:]], listed)
        assert outputs[1].outputs[0].token_ids == expected
        assert outputs[1].stats.num_draft_tokens > 0


def test_abort_frees_everything() -> None:
    model = FakeModel()
    drafter = OracleDrafter(model)
    engine, factory = fake_engine(model, drafter)
    assembled = [factory.assemble({"prompt_token_ids": [1, 2, 3]}, GREEDY, None) for _ in range(3)]
    for each in assembled:
        engine.add(each.requests[0])
    engine.step()
    engine.step()
    engine.abort(assembled[1].requests[0])
    engine.step()
    for each in assembled:
        engine.abort(each.requests[0])
    assert engine.scheduler.pool.num_used == 0
    assert not engine.scheduler.has_unfinished
    assert sorted(drafter.released) == sorted(each.requests[0].request_id for each in assembled)
