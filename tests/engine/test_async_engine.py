"""Many callers on one loop: every one gets its own answer, and none can harm another."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tests.engine.fake import ByteTokenizer, FakeModel, fake_engine

from foredraft.draft.ngram import NgramDrafter
from foredraft.engine.async_engine import AsyncEngine, Piece
from foredraft.errors import EngineStoppedError, RequestError
from foredraft.sampling.params import SamplingParams

PARAMS = SamplingParams(max_tokens=30, temperature=0.0, detokenize=False)


class Served:
    """An `AsyncEngine` over a fake model."""

    def __init__(self, vocab_size: int = 11, **options) -> None:
        self.model = FakeModel(vocab_size, max_model_len=256)
        self.engine, self.factory = fake_engine(self.model, NgramDrafter(1, 3), gamma=3, num_blocks=60, **options)

        def assemble(prompt, params, gamma=None, priority=0):
            return self.factory.assemble(prompt, params, gamma, priority=priority)

        self.async_engine = AsyncEngine(SimpleNamespace(engine=self.engine, assemble=assemble))

    async def __aenter__(self) -> Served:
        await self.async_engine.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.async_engine.stop()
        assert self.engine.scheduler.pool.num_used == 0

    async def answer(self, ids: list[int], params: SamplingParams = PARAMS) -> list[Piece]:
        return [piece async for piece in self.async_engine.generate({"prompt_token_ids": ids}, params)]


def plain(ids: list[int], params: SamplingParams = PARAMS) -> list[int]:
    engine, factory = fake_engine(FakeModel(max_model_len=256), None)
    (request,) = factory.assemble({"prompt_token_ids": ids}, params, None).requests
    engine.add(request)
    while not request.finished:
        engine.step()
    return request.output_token_ids


def tokens(pieces: list[Piece], index: int = 0) -> list[int]:
    return [token for piece in pieces if piece.index == index for token in piece.token_ids]


def test_concurrent_requests_each_get_their_own_answer() -> None:
    prompts = [[1 + index % 9, 2, index % 7] for index in range(24)]

    async def run() -> None:
        async with Served() as tested:
            answers = await asyncio.gather(*(tested.answer(ids) for ids in prompts))
        for ids, pieces in zip(prompts, answers, strict=True):
            assert tokens(pieces) == plain(ids)
            assert pieces[-1].output is not None
            assert pieces[-1].output.outputs[0].token_ids == tokens(pieces)
            assert pieces[-1].finish_reason == "length"
            assert sum(piece.output is not None for piece in pieces) == 1
            assert len("".join(piece.origins for piece in pieces)) == 30

    asyncio.run(run())


def test_choices_of_one_prompt_come_together() -> None:
    params = SamplingParams(max_tokens=12, n=3, seed=4, detokenize=False)

    async def run() -> None:
        async with Served() as tested:
            pieces = await tested.answer([3, 1], params)
        output = pieces[-1].output
        assert output is not None
        assert [tokens(pieces, index) for index in range(3)] == [each.token_ids for each in output.outputs]

    asyncio.run(run())


def test_leaving_early_frees_the_blocks_within_a_step() -> None:
    async def run() -> None:
        async with Served() as tested:
            stream = tested.async_engine.generate(
                {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=200, temperature=0.0, detokenize=False)
            )
            await anext(stream)
            assert tested.engine.scheduler.pool.num_used > 0
            await stream.aclose()
            for _ in range(200):
                if tested.async_engine.num_unfinished == 0:
                    break
                await asyncio.sleep(0.005)
            assert tested.engine.scheduler.pool.num_used == 0
            assert tokens(await tested.answer([5])) == plain([5])

    asyncio.run(run())


def test_cancelled_tasks_leave_the_others_alone() -> None:
    async def run() -> None:
        async with Served() as tested:
            long = SamplingParams(max_tokens=150, temperature=0.0, detokenize=False)
            doomed = [asyncio.create_task(tested.answer([1, index], long)) for index in range(6)]
            kept = [asyncio.create_task(tested.answer([2, index])) for index in range(6)]
            await asyncio.sleep(0.02)
            for task in doomed:
                task.cancel()
            answers = await asyncio.gather(*kept)
            assert [tokens(pieces) for pieces in answers] == [plain([2, index]) for index in range(6)]
            await asyncio.gather(*doomed, return_exceptions=True)

    asyncio.run(run())


def test_a_slow_reader_holds_up_nobody_and_gets_everything_merged() -> None:
    async def run() -> None:
        async with Served() as tested:
            slow = tested.async_engine.generate({"prompt_token_ids": [4, 4]}, PARAMS)
            pieces = [await anext(slow)]
            assert tokens(await tested.answer([7])) == plain([7])
            await asyncio.sleep(0.05)
            pieces += [piece async for piece in slow]
            assert tokens(pieces) == plain([4, 4])
            assert len(pieces) <= 4

    asyncio.run(run())


def test_a_failing_step_ends_its_requests_and_not_the_engine() -> None:
    async def run() -> None:
        async with Served() as tested:
            forward, calls = tested.model.forward, []

            def broken(*arguments, **options):
                calls.append(1)
                if len(calls) == 5:
                    raise RuntimeError("out of luck")
                return forward(*arguments, **options)

            tested.model.forward = broken
            pieces = await tested.answer([1, 2, 3])
            assert pieces[-1].finish_reason == "error"
            assert pieces[-1].output is not None
            assert "out of luck" in str(pieces[-1].output.error)
            assert tested.async_engine.num_failed_steps == 1
            assert tokens(await tested.answer([5, 5])) == plain([5, 5])

    asyncio.run(run())


def test_a_nan_fails_its_own_request_only() -> None:
    async def run() -> None:
        async with Served() as tested:
            tested.model.nan_after = 9
            bad, good = await asyncio.gather(
                tested.answer([1, 9]),
                tested.answer([2, 9, 2], SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)),
            )
            assert bad[-1].finish_reason == "error"
            assert good[-1].finish_reason == "length"

    asyncio.run(run())


def test_what_cannot_be_served_is_refused_before_it_runs() -> None:
    async def run() -> None:
        async with Served() as tested:
            with pytest.raises(RequestError, match="context"):
                await tested.answer([1] * 300)
        with pytest.raises(EngineStoppedError, match="takes no more requests"):
            await tested.answer([1])

    asyncio.run(run())


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def run() -> None:
        async with Served() as tested:
            running = asyncio.create_task(tested.answer([6, 1]))
            await asyncio.sleep(0.01)
            drained = asyncio.create_task(tested.async_engine.drain(10.0))
            await asyncio.sleep(0)
            with pytest.raises(EngineStoppedError):
                await tested.answer([1])
            assert await drained is True
            assert tokens(await running) == plain([6, 1])

    asyncio.run(run())


def test_draining_gives_up_after_its_time() -> None:
    async def run() -> None:
        async with Served() as tested:
            step = tested.engine.step

            def slow():
                torch.zeros(1)
                import time

                time.sleep(0.02)
                return step()

            tested.engine.step = slow
            running = asyncio.create_task(
                tested.answer([6, 1], SamplingParams(max_tokens=200, temperature=0.0, detokenize=False))
            )
            await asyncio.sleep(0.1)
            assert await tested.async_engine.drain(0.1) is False
            pieces = await running
            assert pieces[-1].finish_reason == "abort"

    asyncio.run(run())


def test_one_choice_can_be_ended_while_the_others_go_on() -> None:
    params = SamplingParams(max_tokens=120, n=2, seed=4, detokenize=False)

    async def run() -> None:
        async with Served() as tested:
            stream = await tested.async_engine.submit({"prompt_token_ids": [3, 1]}, params)
            pieces = []
            async for piece in stream.pieces():
                if not pieces:
                    stream.abort(0)
                pieces.append(piece)
            output = pieces[-1].output
            assert output is not None
            assert [each.finish_reason for each in output.outputs] == ["abort", "length"]
            assert tokens(pieces, 0) == output.outputs[0].token_ids
            assert tokens(pieces, 1) == output.outputs[1].token_ids
            assert len(tokens(pieces, 1)) == 120

    asyncio.run(run())


def test_the_best_completions_come_ranked_at_the_end() -> None:
    params = SamplingParams(max_tokens=12, n=2, best_of=5, seed=4, detokenize=False)

    async def run() -> None:
        async with Served() as tested:
            pieces = await tested.answer([3, 1], params)
        output = pieces[-1].output
        assert output is not None
        assert [piece.index for piece in pieces] == [0, 1]
        assert [tokens(pieces, index) for index in range(2)] == [each.token_ids for each in output.outputs]

    asyncio.run(run())


def test_a_step_that_fails_after_a_request_ended_gives_its_blocks_back() -> None:
    async def run() -> None:
        async with Served() as tested:
            settle, calls = tested.engine.scheduler.settle, []

            def broken(request):
                settle(request)
                if request.finished and not calls:
                    calls.append(1)
                    raise RuntimeError("at the very end")

            tested.engine.scheduler.settle = broken
            pieces = await tested.answer([1, 2, 3])
            assert pieces[-1].output is not None
            assert calls
            assert tested.engine.scheduler.pool.num_used == 0
            assert not tested.engine.scheduler.running
            assert tokens(await tested.answer([1, 2, 3])) == plain([1, 2, 3])

    asyncio.run(run())


def test_work_between_steps_returns_or_raises_to_its_caller_alone() -> None:
    async def run() -> None:
        async with Served() as tested:
            running = asyncio.create_task(tested.answer([6, 1]))
            assert await tested.async_engine.between_steps(lambda: 7) == 7
            with pytest.raises(ZeroDivisionError):
                await tested.async_engine.between_steps(lambda: 1 // 0)
            assert tokens(await running) == plain([6, 1])

    asyncio.run(run())


def test_an_engine_whose_steps_all_fail_is_stuck_until_one_works() -> None:
    async def run() -> None:
        async with Served() as tested:
            forward = tested.model.forward
            tested.model.forward = None
            for _ in range(3):
                assert not tested.async_engine.is_stuck
                await tested.answer([1, 2])
            assert tested.async_engine.is_stuck
            tested.model.forward = forward
            assert tokens(await tested.answer([1, 2])) == plain([1, 2])
            assert not tested.async_engine.is_stuck

    asyncio.run(run())


def test_every_token_knows_where_its_characters_end() -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2)

    async def run() -> None:
        async with Served(vocab_size=256, tokenizer=ByteTokenizer()) as tested:
            pieces = await tested.answer([65, 66], params)
        text, ends = "".join(piece.text for piece in pieces), [end for piece in pieces for end in piece.ends]
        ids = tokens(pieces)
        assert len(ends) == len(ids)
        assert ends[-1] == len(text)
        for count, end in enumerate(ends, start=1):
            assert bytes(ids[:count]).decode(errors="replace").startswith(text[:end])

    asyncio.run(run())
