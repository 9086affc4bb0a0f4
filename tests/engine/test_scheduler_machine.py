"""Random operations on a small engine: after each, every block is where it belongs, and everybody gets on."""

from __future__ import annotations

import random
from contextlib import ExitStack
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.engine.checks import Historian, check_blocks, finish, guard_writes, preempt
from tests.engine.fake import OracleDrafter, fake_engine

from foredraft.draft.proposal import DraftProposal
from foredraft.engine import queue
from foredraft.engine.request import Request
from foredraft.sampling.params import SamplingParams

BLOCK = 4
MAX_OVERTAKEN = 1


class MoodyDrafter(OracleDrafter):
    """Right with a chance that changes, and with a context that reaches over only some of the cached blocks."""

    def __init__(self, model: Historian, generator: random.Random) -> None:
        super().__init__(model)
        self.generator = generator
        self.chance = 1.0
        self.num_known_blocks = 100

    def propose(self, requests):
        drafts = []
        for request in requests:
            assert len(request.block_table) * BLOCK >= len(request.token_ids) + request.max_draft_tokens
            draft = self.model.greedy(request.token_ids, self.generator.randint(0, request.max_draft_tokens))
            wrong = [self.generator.random() >= self.chance for _ in draft]
            drafts.append([(token + miss) % 11 for token, miss in zip(draft, wrong, strict=True)])
        return DraftProposal.deterministic(drafts)

    def num_reusable(self, block_table, block_hashes) -> int:
        return min(len(block_hashes), self.num_known_blocks)


class Machine(RuleBasedStateMachine):
    """Adds, steps, cancels and preempts requests over few blocks; texts are prefixes and forks of a few stories."""

    @initialize(
        num_blocks=st.integers(8, 24),
        max_num_seqs=st.integers(1, 5),
        extra_budget=st.integers(0, 20),
        gamma=st.integers(0, 5),
        shares=st.booleans(),
        seed=st.integers(0, 1000),
    )
    def build(self, num_blocks: int, max_num_seqs: int, extra_budget: int, gamma: int, shares: bool, seed: int) -> None:
        self.model = Historian()
        self.drafter = MoodyDrafter(self.model, random.Random(seed))
        self.engine, self.factory = fake_engine(
            self.model,
            self.drafter if gamma else None,
            gamma=gamma,
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            enable_prefix_caching=shares,
        )
        guard_writes(self.engine)
        self.longest = num_blocks * BLOCK
        self.requests: list[Request] = []
        self.patched = ExitStack()
        self.patched.enter_context(mock.patch.object(queue, "MAX_OVERTAKEN", MAX_OVERTAKEN))
        self.oldest: Request | None = None
        self.num_passed = 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        with self.patched:
            finish(self.engine, limit=sum(len(each.token_ids) + each.max_tokens for each in self.requests) + 10)
            self.tokens_are_the_definitions()

    @property
    def scheduler(self):
        return self.engine.scheduler

    @rule(
        story=st.integers(0, 2),
        length=st.integers(1, 40),
        fork=st.integers(0, 40),
        max_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        priority=st.integers(-1, 2),
        stop=st.sampled_from([None, [4, 7]]),
    )
    def add(
        self, story: int, length: int, fork: int, max_tokens: int, n: int, priority: int, stop: list[int] | None
    ) -> None:
        text = [(7 * story + place * story) % 11 for place in range(length)]  # of one token, in story 0
        if fork < length:
            text[fork] = 10 - text[fork]
        text = text[: max(1, self.longest - max_tokens)]
        limit = min(max_tokens, self.longest - len(text))
        params = SamplingParams(temperature=0.0, max_tokens=limit, n=n, stop_token_ids=stop)
        for request in self.factory.assemble({"prompt_token_ids": text}, params, None, priority=priority).requests:
            self.engine.add(request)
            self.requests.append(request)

    @rule(spare=st.integers(1, 8), count=st.integers(2, 6), max_tokens=st.integers(1, 6))
    def add_a_big_one_and_small_ones(self, spare: int, count: int, max_tokens: int) -> None:
        """One that needs nearly all blocks, so that it waits for whoever runs, and behind it some that would fit."""
        length = self.longest - spare
        self.add(story=1, length=length, fork=length, max_tokens=spare, n=1, priority=0, stop=None)
        for number in range(count):
            self.add(story=2, length=1 + number, fork=0, max_tokens=max_tokens, n=1, priority=0, stop=None)

    @precondition(lambda self: self.requests)
    @rule(chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]), known=st.sampled_from([0, 1, 100]), count=st.integers(1, 4))
    def step(self, chance: float, known: int, count: int) -> None:
        self.drafter.chance, self.drafter.num_known_blocks = chance, known
        for _ in range(count):
            self._one_step()

    def _one_step(self) -> None:
        waiting, running = list(self.scheduler.waiting), list(self.scheduler.running)
        before = {request: (request.num_computed_tokens, len(request.token_ids)) for request in running}
        changed = self.engine.step()
        assert changed or self.scheduler.running or not (waiting or running), "there was work, and nothing happened"
        for request in running:
            if request.finished or request in self.scheduler.waiting:
                continue
            assert (request.num_computed_tokens, len(request.token_ids)) > before[request], "a running request stood"
        if running:
            assert running[0] not in self.scheduler.waiting, "the first in rank gave way"
        check_blocks(self.engine)
        self._count_passing(waiting)

    def _count_passing(self, waiting: list[Request]) -> None:
        """How many later ones started while the same request was the oldest that waited."""
        oldest = min(waiting, key=lambda each: each.order, default=None)
        if oldest is not self.oldest:
            self.oldest, self.num_passed = oldest, 0
        if oldest is None or oldest not in self.scheduler.waiting:
            self.oldest = None
            return
        self.num_passed += sum(request is not oldest and request not in self.scheduler.waiting for request in waiting)
        assert self.num_passed <= MAX_OVERTAKEN, "the oldest waiting request was passed too often"

    @precondition(lambda self: self.requests)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        request = self.requests[choice % len(self.requests)]
        self.engine.abort(request)
        assert request.finished
        assert request.block_table == []
        assert request not in self.scheduler.running
        assert request not in self.scheduler.waiting

    @precondition(lambda self: self.requests and self.scheduler.running)
    @rule(choice=st.integers(0, 1000))
    def preempt(self, choice: int) -> None:
        preempt(self.engine, self.scheduler.running[choice % len(self.scheduler.running)])

    @rule()
    def forget(self) -> None:
        self.scheduler.pool.forget()

    @invariant()
    def blocks_are_where_they_belong(self) -> None:
        if hasattr(self, "engine"):
            check_blocks(self.engine)

    @invariant()
    def tokens_are_the_definitions(self) -> None:
        for request in getattr(self, "requests", []):
            expected = self.model.greedy(request.token_ids[: request.num_prompt_tokens], request.num_output_tokens)
            assert request.output_token_ids == expected
            if request.finish_reason == "length":
                assert request.num_output_tokens == request.max_tokens
            if request.finish_reason == "stop":
                assert [token in (4, 7) for token in expected] == [False] * (len(expected) - 1) + [True]


Machine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = Machine.TestCase
