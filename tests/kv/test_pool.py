"""The block pool: nothing taken twice, nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.kv.pool import BlockPool, blocks_for


def test_reserve_takes_all_or_nothing() -> None:
    pool = BlockPool(4, 8)
    first: list[int] = []
    assert pool.reserve(first, 17)
    assert len(first) == 3
    second: list[int] = []
    assert not pool.reserve(second, 9)
    assert second == []
    assert pool.reserve(second, 8)
    pool.truncate(first, 8)
    assert len(first) == 1
    assert pool.num_free == 2


@given(
    block_size=st.integers(1, 5),
    operations=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.booleans()), max_size=60),
)
def test_every_block_has_one_owner(block_size: int, operations: list[tuple[int, int, bool]]) -> None:
    pool = BlockPool(12, block_size)
    tables: list[list[int]] = [[] for _ in range(4)]
    for owner, num_tokens, grow in operations:
        table = tables[owner]
        before = len(table)
        if not grow:
            pool.truncate(table, num_tokens)
            assert len(table) == min(before, blocks_for(num_tokens, block_size))
        elif pool.reserve(table, num_tokens):
            assert len(table) == max(before, blocks_for(num_tokens, block_size))
        else:
            assert len(table) == before
        owned = [block for each in tables for block in each]
        assert len(owned) == len(set(owned)) == pool.num_used
        assert set(owned) <= set(range(12))
