"""Which requests take part in the next step, and with how many tokens.

Owns the waiting and running requests and the block pool. Knows neither models nor tokens' values.

Three rules keep it fair. Requests start in the order of `engine.queue`, and when the next one does not fit, nobody
passes it: a big prompt waits until enough running requests have ended, not for ever. Every running request gets tokens
in every step, and one with a prompt to compute, as well as the next to start, an equal share of half of them, whatever
the others draft. When blocks run out, the last in rank gives way, so that the first in rank always goes on.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.engine.queue import WaitingQueue, rank
from foredraft.engine.request import Request, RequestStatus
from foredraft.errors import OutOfBlocksError
from foredraft.kv.hashes import extend_block_hashes
from foredraft.kv.pool import BlockPool, blocks_for

NumReusable = Callable[[Sequence[int], Sequence[bytes]], int]
"""Of the leading cached blocks of a request (ids, hashes), how many the drafter can go on from."""


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


@dataclass
class PrefixStats:
    """Tokens of started requests that were looked for among the published blocks, and those that were found there."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0


class Scheduler:
    """By priority, then first come, first served, with chunked prefill beside decoding, preemption by recompute and
    reuse of what other requests with the same beginning have computed.

    Args:
        pool: the KV-cache blocks.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: tokens of one step, drafts included.
        num_speculative_tokens: γ, 0 for none.
        max_model_len: longest sequence in tokens.
        enable_prefix_caching: whether requests share blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.pool = pool
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by rank
        self.num_preemptions = 0
        self.prefix_stats = PrefixStats()
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._gamma = num_speculative_tokens
        self._max_model_len = max_model_len
        self._shares_blocks = enable_prefix_caching

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
        self._hash(request)
        self.waiting.add(request)

    def schedule(self, num_reusable: NumReusable | None = None) -> tuple[list[Scheduled], list[Request]]:
        """The next step's requests with their blocks reserved, and the requests preempted to make room.

        Args:
            num_reusable: how many of a new request's cached blocks the drafter can go on from; None for all.
        """
        budget = self._max_num_batched_tokens
        plan: list[Scheduled] = []
        preempted: list[Request] = []
        next_one = self.waiting.first if len(self.running) < self._max_num_seqs else None
        num_sharing = len(self.running) + (next_one is not None)
        shares = [self._share(request, num_sharing) for request in self.running]
        reserved = sum(shares) + (self._share(next_one, num_sharing) if next_one else 0)
        for request, share in zip(list(self.running), shares, strict=True):
            reserved -= share
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
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
        if not preempted:
            plan += self._start(budget, num_reusable)
        return plan, preempted

    def settle(self, request: Request) -> None:
        """After a step's tokens are committed: gives back the blocks of rejected drafts, and publishes full ones."""
        self.pool.truncate(request.block_table, len(request.token_ids))
        if not self._shares_blocks:
            return
        self._hash(request)
        num_full = request.num_computed_tokens // self.pool.block_size
        for index in range(request.num_published_blocks, num_full):
            self.pool.publish(request.block_table[index], request.block_hashes[index])
        request.num_published_blocks = num_full

    def release(self, request: Request) -> None:
        """Takes a finished or aborted request out of its queue and frees its blocks."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.truncate(request.block_table, 0)

    def _start(self, budget: int, num_reusable: NumReusable | None) -> list[Scheduled]:
        """Starts waiting requests while there is room."""
        plan: list[Scheduled] = []
        deferred: set[Request] = set()
        while len(self.running) < self._max_num_seqs and budget > 0:
            request = next((each for each in self.waiting if each not in deferred), None)
            if request is None:
                break
            reused = self._cached_blocks(request, num_reusable)
            if self._is_awaited(request, len(reused)):
                deferred.add(request)
                continue
            # Room for all of its tokens at once: half a prompt would take blocks from others and be of no use.
            if not self.pool.reserve(request.block_table, len(request.token_ids), reused):
                break
            self.waiting.start(request)
            insort(self.running, request, key=rank)
            request.start()
            request.num_computed_tokens = len(reused) * self.pool.block_size
            request.num_published_blocks = len(reused)
            self._count(request)
            part = self._part(request, budget)
            if not self._reserve(part):
                part = Scheduled(request, part.num_tokens, 0)
            plan.append(part)
            budget -= part.num_tokens + part.max_draft_tokens
        return plan

    def _share(self, request: Request, num_sharing: int) -> int:
        """Tokens of a step that others leave to `request`, one of `num_sharing`; at least one, and one for decoding."""
        return min(request.num_pending_tokens, max(1, self._max_num_batched_tokens // (2 * num_sharing)))

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
        """Takes a running request's blocks; its tokens stay and are computed again later, as far as the blocks that it
        published are not found."""
        self.running.remove(request)
        self.pool.truncate(request.block_table, 0)
        request.num_computed_tokens = request.num_published_blocks = 0
        request.status = RequestStatus.WAITING
        self.waiting.put_back(request)
        self.num_preemptions += 1

    def _hash(self, request: Request) -> None:
        if self._shares_blocks:
            extend_block_hashes(request.block_hashes, request.token_ids, self.pool.block_size)

    def _cached_blocks(self, request: Request, num_reusable: NumReusable | None) -> list[int]:
        """Published blocks that `request` can begin with; never its last token's, whose logits are wanted, and none for
        a prompt whose log-probabilities are."""
        if request.wants_prompt_logprobs:
            return []
        hashes = request.block_hashes[: self._max_reused(request)]
        found = self.pool.find(hashes)
        if num_reusable is not None and found:
            found = found[: num_reusable(found, hashes[: len(found)])]
        return found

    def _max_reused(self, request: Request) -> int:
        return (len(request.token_ids) - 1) // self.pool.block_size

    def _is_awaited(self, request: Request, num_reused: int) -> bool:
        """Whether a running request before `request` is about to compute more than half of what `request` lacks, as the
        samples of one prompt do for each other. An overdue request waits for nobody."""
        if request.wants_prompt_logprobs or request.overdue:
            return False
        size, last = self.pool.block_size, self._max_reused(request)
        lacking = len(request.token_ids) - num_reused * size
        for other in self.running:
            if other.rank > request.rank or other.num_pending_tokens == 1:
                continue
            common = num_reused
            while common < min(last, len(other.block_hashes)) and (
                other.block_hashes[common] == request.block_hashes[common]
            ):
                common += 1
            if 2 * size * (common - num_reused) > lacking and other.num_computed_tokens < common * size:
                return True
        return False

    def _count(self, request: Request) -> None:
        """Counts a request's look-up, once: what it finds of its own after a preemption says nothing about sharing."""
        if request.num_cached_tokens is not None:
            return
        request.num_cached_tokens = request.num_computed_tokens
        if self._shares_blocks and not request.wants_prompt_logprobs:
            self.prefix_stats.num_queried_tokens += len(request.token_ids)
            self.prefix_stats.num_hit_tokens += request.num_computed_tokens
