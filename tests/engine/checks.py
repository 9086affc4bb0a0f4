"""What must hold between any two steps of an engine, whatever led there."""

from __future__ import annotations

from collections import Counter
from zlib import crc32

from tests.engine.fake import FakeModel
from torch import Tensor

from foredraft.engine.request import Request, RequestStatus
from foredraft.engine.step import Engine
from foredraft.kv.hashes import extend_block_hashes
from foredraft.kv.pool import blocks_for


class Historian(FakeModel):
    """Its logits depend on every token of the history, so that one stale slot anywhere shows."""

    def next_logits(self, history) -> Tensor:
        rows = self.table.flatten(0, 1)
        return rows[crc32(bytes(history)) % len(rows)]


def check_blocks(engine: Engine) -> None:
    """Every block has exactly the holders that are counted, tables fit their texts, and shared blocks are full blocks
    of text that their holders have in common."""
    scheduler, pool = engine.scheduler, engine.scheduler.pool
    size = pool.block_size
    for request in scheduler.waiting:
        assert request.status is RequestStatus.WAITING
        assert request.block_table == []
        assert request.num_computed_tokens == request.num_published_blocks == 0
    held: Counter[int] = Counter()
    texts: dict[int, list[int]] = {}
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        fewest, most = blocks_for(request.num_computed_tokens, size), blocks_for(len(request.token_ids), size)
        assert fewest <= len(request.block_table) <= most
        assert len(set(request.block_table)) == len(request.block_table)
        assert request.num_computed_tokens < len(request.token_ids)
        held.update(request.block_table)
        for index, block in enumerate(request.block_table):
            end = (index + 1) * size
            if pool.num_holders(block) > 1 or pool.is_published(block):
                assert end <= request.num_computed_tokens, "a shared block is written again"
                text = request.token_ids[:end]
                assert texts.setdefault(block, text) == text
            if pool.is_published(block):
                hashes: list[bytes] = []
                extend_block_hashes(hashes, text, size)
                assert pool._published[hashes[-1]] == block, "a block is found under another's text"
    assert {block: pool.num_holders(block) for block in range(pool.num_blocks) if pool.num_holders(block)} == held
    assert sorted([*pool._empty, *pool._kept, *held]) == list(range(pool.num_blocks))
    assert pool.num_used == len(held)
    assert [request.rank for request in scheduler.running] == sorted(request.rank for request in scheduler.running)
    assert len(scheduler.running) <= scheduler._max_num_seqs


def guard_writes(engine: Engine) -> None:
    """From now on every forward asserts that it writes to nothing shared or published: what makes copying on a write
    unnecessary."""
    forward, pool = engine.model.forward, engine.scheduler.pool

    def guarded(batch, *rest):
        for block in set((batch.slot_mapping // pool.block_size).tolist()):
            assert pool.num_holders(block) == 1
            assert not pool.is_published(block)
        return forward(batch, *rest)

    engine.model.forward = guarded


def preempt(engine: Engine, request: Request) -> None:
    """Takes a running request's blocks, as running out of them does."""
    engine.scheduler._preempt(request)
    engine._forget([request])


def finish(engine: Engine, limit: int = 10000) -> None:
    """Runs until nothing is left, checking after every step."""
    for _ in range(limit):
        if not engine.scheduler.has_unfinished:
            break
        engine.step()
        check_blocks(engine)
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.pool.num_used == 0
