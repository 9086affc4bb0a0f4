"""A request's tokens are its own: whoever shares the batch, whenever its blocks are taken, whatever was cached."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.engine.checks import Historian, check_blocks, finish, guard_writes, preempt
from tests.engine.fake import OracleDrafter, fake_engine
from tests.models.tiny import save_tiny

from foredraft import LLM, SpeculativeConfig
from foredraft.draft.ngram import NgramDrafter
from foredraft.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 4


def random_text(generator: random.Random, vocab_size: int, longest: int) -> list[int]:
    """Texts that often begin alike."""
    story = generator.randrange(3)
    text = [(7 * story + place * (story + 2)) % vocab_size for place in range(generator.randint(1, longest))]
    for _ in range(generator.randrange(2)):
        text[generator.randrange(len(text))] = generator.randrange(vocab_size)
    return text


def random_params(generator: random.Random, **more) -> SamplingParams:
    """Greedy or seeded, so that there is one right output."""
    return SamplingParams(
        temperature=generator.choice([0.0, 0.7, 1.0]),
        seed=generator.randrange(1000),
        top_k=generator.choice([0, 5]),
        top_p=generator.choice([1.0, 0.9]),
        frequency_penalty=generator.choice([0.0, 0.5]),
        min_tokens=generator.choice([0, 3]),
        stop_token_ids=generator.choice([None, [4]]),
        prompt_logprobs=generator.choice([None, None, None, 1]),
        max_tokens=generator.randint(3, 14),
        **more,
    )


def alone(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    """The completions of one prompt by plain decoding on an engine of its own, one after the other."""
    engine, factory = fake_engine(Historian(), None, num_blocks=64, max_num_seqs=1, enable_prefix_caching=False)
    assembled = factory.assemble({"prompt_token_ids": prompt}, params, None)
    for request in assembled.requests:
        engine.add(request)
        while not request.finished:
            engine.step()
    return [request.output_token_ids for request in assembled.requests]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("who", [0, 1, 2])
def test_preemption_at_every_possible_step_leaves_the_tokens(shares: bool, who: int) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 1, 1, 1, 1, 3], [5]]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=14)
    expected = [alone(prompt, params)[0] for prompt in prompts]
    num_preempted = step = 0
    while num_preempted == step:  # until the request has ended before the step at which its blocks are taken
        step += 1
        model = Historian()
        engine, factory = fake_engine(
            model, OracleDrafter(model, 3), max_num_batched_tokens=9, max_num_seqs=3, enable_prefix_caching=shares
        )
        guard_writes(engine)
        requests = [factory.assemble({"prompt_token_ids": prompt}, params, None).requests[0] for prompt in prompts]
        for request in requests:
            engine.add(request)
        for _ in range(step):
            engine.step()
        while requests[who] in engine.scheduler.waiting:  # not started yet
            engine.step()
        if not requests[who].finished:
            preempt(engine, requests[who])
            num_preempted += 1
        finish(engine)
        assert [request.output_token_ids for request in requests] == expected
    assert num_preempted > 5


@pytest.mark.parametrize("seed", range(60))
def test_output_does_not_depend_on_batch_mates(seed: int) -> None:
    generator = random.Random(seed)
    model = Historian()
    drafter = generator.choice([OracleDrafter(model, 3), NgramDrafter(1, 3), None])
    engine, factory = fake_engine(
        model,
        drafter,
        gamma=generator.randint(1, 6),
        num_blocks=generator.randint(14, 60),
        max_num_seqs=generator.randint(2, 6),
        max_num_batched_tokens=generator.randint(8, 60),
    )
    prompts = [random_text(generator, 11, 24) for _ in range(6)]
    params = [random_params(generator, n=generator.choice([1, 1, 2])) for _ in prompts]
    assembled = [
        factory.assemble({"prompt_token_ids": prompt}, each, None, priority=generator.randrange(3))
        for prompt, each in zip(prompts, params, strict=True)
    ]
    for each in assembled:
        for request in each.requests:
            engine.add(request)
    finish(engine)
    for each, prompt, chosen in zip(assembled, prompts, params, strict=True):
        assert [request.output_token_ids for request in each.requests] == alone(prompt, chosen)


def test_two_hundred_requests_come_and_go() -> None:
    """Random arrivals, lengths and parameters, one in ten cancelled: all others right, all blocks back."""
    generator = random.Random(200)
    model = Historian()
    engine, factory = fake_engine(
        model, OracleDrafter(model, 3), num_blocks=26, max_num_seqs=8, max_num_batched_tokens=40
    )
    guard_writes(engine)
    drawn = [(random_text(generator, 11, 40), random_params(generator)) for _ in range(200)]
    arrivals = sorted(generator.randrange(250) for _ in drawn)
    doomed = set(generator.sample(range(200), 20))
    requests, step = [], 0
    while engine.scheduler.has_unfinished or len(requests) < 200:
        while len(requests) < 200 and arrivals[len(requests)] <= step:
            prompt, params = drawn[len(requests)]
            priority = generator.randrange(3)
            requests += factory.assemble({"prompt_token_ids": prompt}, params, None, priority=priority).requests
            engine.add(requests[-1])
        engine.step()
        check_blocks(engine)
        alive = [number for number in doomed if number < len(requests) and not requests[number].finished]
        if alive and generator.random() < 0.3:
            victim = requests[generator.choice(alive)]
            engine.abort(victim)
            assert victim.block_table == []
        step += 1
    assert engine.scheduler.pool.num_used == 0
    assert engine.scheduler.num_preemptions > 0
    assert engine.scheduler.prefix_stats.num_hit_tokens > 0
    assert engine.stats.num_draft_tokens > 0
    aborted = [number for number, request in enumerate(requests) if request.finish_reason == "abort"]
    assert 10 < len(aborted) <= 20
    assert set(aborted) <= doomed
    for number, request in enumerate(requests):
        (expected,) = alone(*drawn[number])
        assert request.output_token_ids == expected[: request.num_output_tokens]
        if request.finish_reason != "abort":
            assert request.finish_reason in ("length", "stop")
            assert request.output_token_ids == expected
            wanted = request.params.prompt_logprobs is not None
            assert len(request.prompt_logprobs) == (request.num_prompt_tokens if wanted else 0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    target, draft = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    for path, seed in ((target, 0), (draft, 1)):
        save_tiny(path, "llama", seed, eos_token_id=None)
    return target, draft


def test_output_of_a_network_does_not_depend_on_batch_mates(directories) -> None:
    """Sixty random mixes in float32, greedy and seeded, on one engine whose prefix cache they fill for each other."""
    target, draft = map(str, directories)
    options = {"dtype": "float32", "device": "cpu", "block_size": BLOCK, "skip_tokenizer_init": True}
    speculative = SpeculativeConfig(model=draft, num_speculative_tokens=3)
    llm = LLM(target, speculative=speculative, max_num_seqs=4, max_num_batched_tokens=40, **options)
    plain = LLM(target, max_num_seqs=1, enable_prefix_caching=False, **options)
    known: dict[tuple, list[int]] = {}
    generator = random.Random(3)
    texts = [random_text(generator, 101, 30) for _ in range(8)]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=8),
        SamplingParams(temperature=1.0, seed=5, max_tokens=8),
        SamplingParams(temperature=0.8, seed=6, top_p=0.9, frequency_penalty=0.4, max_tokens=6),
    ]
    for _ in range(60):
        mix = [(generator.randrange(8), generator.randrange(3)) for _ in range(generator.randint(2, 6))]
        prompts = [{"prompt_token_ids": texts[text]} for text, _ in mix]
        outputs = llm.generate(prompts, [kinds[kind] for _, kind in mix])
        for pair, prompt, output in zip(mix, prompts, outputs, strict=True):
            if pair not in known:
                known[pair] = plain.generate(prompt, kinds[pair[1]])[0].outputs[0].token_ids
            assert output.outputs[0].token_ids == known[pair]
    assert llm.stats.num_draft_tokens > 0
    assert llm.engine.scheduler.prefix_stats.num_hit_tokens > 0
    assert llm.engine.scheduler.pool.num_used == 0
