"""Which requests take part in the next step, and with how many tokens.

Owns the waiting and running queues and the block pool. Knows neither models nor tokens' values.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from foredraft.engine.request import Request, RequestStatus
from foredraft.errors import OutOfBlocksError
from foredraft.kv.pool import BlockPool, blocks_for


@dataclass(frozen=True)
class Scheduled:
    """A request's part in a step: `num_tokens` of its pending tokens, and room for `max_draft_tokens` drafts.

    `samples` is whether the step reaches the end of its tokens, so that its next token can be chosen.
    """

    request: Request
    num_tokens: int
    max_draft_tokens: int

    @property
    def samples(self) -> bool:
        return self.num_tokens == self.request.num_pending_tokens

    def num_logits(self, num_drafts: int) -> int:
        """Logits rows of this part with `num_drafts` draft tokens: the last ones of its query, all for a prompt whose
        log-probabilities are asked for."""
        if self.request.wants_prompt_logprobs:
            return self.num_tokens + num_drafts
        return 1 + num_drafts if self.samples else 0


class Scheduler:
    """First come, first served, with chunked prefill beside decoding and preemption by recompute.

    Args:
        pool: the KV-cache blocks.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step, drafts included.
        num_speculative_tokens: γ, 0 for none.
        max_model_len: longest sequence in tokens.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int,
        max_model_len: int,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._gamma = num_speculative_tokens
        self._max_model_len = max_model_len

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request; raises `OutOfBlocksError` when the whole pool could not hold it."""
        longest = request.num_prompt_tokens + request.max_tokens
        needed = blocks_for(longest, self.pool.block_size)
        if needed > self.pool.num_blocks:
            raise OutOfBlocksError(
                f"request {request.request_id} can grow to {longest} tokens and needs {needed} KV-cache blocks of "
                f"{self.pool.block_size} tokens, but the cache has {self.pool.num_blocks}: lower max_tokens or raise "
                "kv_cache_memory"
            )
        self.waiting.append(request)

    def schedule(self) -> tuple[list[Scheduled], list[Request]]:
        """The next step's requests with their blocks reserved, and the requests preempted to make room."""
        budget = self._max_num_batched_tokens
        plan: list[Scheduled] = []
        preempted: list[Request] = []
        # A token for everyone first: no draft and no prompt chunk may crowd out a running request.
        reserved = len(self.running)
        for request in list(self.running):
            reserved -= 1
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one
            part = self._part(request, budget - reserved)
            while not self._reserve(part):
                if part.max_draft_tokens:
                    part = Scheduled(request, part.num_tokens, 0)
                    continue
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            if request.status is RequestStatus.RUNNING:
                plan.append(part)
                budget -= part.num_tokens + part.max_draft_tokens
        while self.waiting and not preempted and len(self.running) < self._max_num_seqs and budget > 0:
            part = self._part(self.waiting[0], budget)
            if not self._reserve(part):
                break
            request = self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            plan.append(part)
            budget -= part.num_tokens + part.max_draft_tokens
        return plan, preempted

    def _part(self, request: Request, budget: int) -> Scheduled:
        num_tokens = min(request.num_pending_tokens, budget)
        if request.num_pending_tokens > 1:  # prefill: the drafters learn the prompt when it is complete
            return Scheduled(request, num_tokens, 0)
        wanted = self._gamma if request.max_draft_tokens is None else min(request.max_draft_tokens, self._gamma)
        # A draft past the last token that may come is wasted: the target adds one of its own.
        room = min(request.num_remaining_tokens - 1, self._max_model_len - len(request.token_ids) - 1)
        return Scheduled(request, num_tokens, max(0, min(wanted, room, budget - num_tokens)))

    def _reserve(self, part: Scheduled) -> bool:
        request = part.request
        end = request.num_computed_tokens + part.num_tokens + part.max_draft_tokens
        return self.pool.reserve(request.block_table, end)

    def _preempt(self, request: Request) -> None:
        """Takes a running request's blocks; its tokens stay and are computed again later."""
        self.running.remove(request)
        self.pool.truncate(request.block_table, 0)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        self.waiting.appendleft(request)
        self.num_preemptions += 1

    def release(self, request: Request) -> None:
        """Takes a finished or aborted request out of its queue and frees its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.truncate(request.block_table, 0)
