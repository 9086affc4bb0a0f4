"""Published blocks: found by the whole text up to their end, held by many, evicted oldest first, never lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from foredraft.kv.hashes import extend_block_hashes
from foredraft.kv.pool import BlockPool


def hashes_of(token_ids: list[int], block_size: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_block_hashes(hashes, token_ids, block_size)
    return hashes


def filled(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """The table of a text that was computed and published."""
    table: list[int] = []
    assert pool.reserve(table, len(token_ids))
    for block, block_hash in zip(table, hashes_of(token_ids, pool.block_size), strict=False):
        pool.publish(block, block_hash)
    return table


@given(st.lists(st.integers(0, 1), max_size=14), st.lists(st.integers(0, 1), max_size=14), st.integers(1, 4))
def test_hashes_agree_exactly_as_far_as_full_blocks_of_the_texts_do(left: list[int], right: list[int], size: int):
    ours, theirs = hashes_of(left, size), hashes_of(right, size)
    assert len(ours) == len(left) // size
    for block, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        end = (block + 1) * size
        assert (one == other) == (left[:end] == right[:end])


@given(st.lists(st.integers(0, 200000), min_size=1, max_size=40), st.data())
def test_hashes_of_a_growing_text_are_those_of_the_whole(token_ids: list[int], data) -> None:
    hashes: list[bytes] = []
    for end in sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=5))):
        extend_block_hashes(hashes, token_ids[:end], 4)
    extend_block_hashes(hashes, token_ids, 4)
    assert hashes == hashes_of(token_ids, 4)


def test_a_freed_block_is_found_until_its_memory_is_wanted() -> None:
    pool = BlockPool(4, 2)
    text = [1, 2, 3, 4, 5]
    table = filled(pool, text)
    first, second = table[:2]
    pool.truncate(table, 0)
    assert pool.num_used == 0
    assert pool.find(hashes_of(text, 2)) == [first, second]
    other: list[int] = []
    assert pool.reserve(other, 4)  # two blocks were empty
    assert pool.find(hashes_of(text, 2)) == [first, second]
    assert pool.reserve(other, 6)  # a text's end goes before its beginning
    assert pool.find(hashes_of(text, 2)) == [first]
    assert pool.reserve(other, 8)
    assert pool.find(hashes_of(text, 2)) == []
    assert not pool.reserve(other, 9)


def test_what_was_used_longest_ago_is_evicted_first() -> None:
    pool = BlockPool(3, 1)
    tables = [filled(pool, [token]) for token in (7, 8, 9)]
    for table in tables:
        pool.truncate(table, 0)
    again: list[int] = []
    assert pool.reserve(again, 1, pool.find(hashes_of([7], 1)))
    pool.truncate(again, 0)
    taken: list[int] = []
    assert pool.reserve(taken, 2)
    assert [len(pool.find(hashes_of([token], 1))) for token in (7, 8, 9)] == [1, 0, 0]


def test_sharing_takes_all_or_nothing_and_counts_the_shared_blocks_once() -> None:
    pool = BlockPool(4, 2)
    text = [1, 2, 3, 4]
    table = filled(pool, text)
    found = pool.find(hashes_of(text, 2))
    sharing: list[int] = []
    assert pool.reserve(sharing, 7, found)
    assert sharing[:2] == table
    assert pool.num_used == 4
    assert [pool.num_holders(block) for block in sharing] == [2, 2, 1, 1]
    refused: list[int] = []
    assert not pool.reserve(refused, 5, found)
    assert refused == []
    pool.truncate(table, 0)
    assert pool.num_used == 4
    pool.truncate(sharing, 0)
    assert pool.num_used == 0
    # Free blocks that are to be reused are no room for what comes after them.
    assert pool.reserve(refused, 8, found)
    assert not pool.reserve([], 1)


def test_the_first_of_two_equal_blocks_stays_the_published_one() -> None:
    pool = BlockPool(4, 2)
    first, second = filled(pool, [1, 2]), filled(pool, [1, 2])
    assert first != second
    assert pool.find(hashes_of([1, 2], 2)) == first
    assert not pool.is_published(second[0])
    (block,) = first
    pool.truncate(second, 0)
    pool.truncate(first, 0)
    assert pool.find(hashes_of([1, 2], 2)) == [block]


def test_forgetting_leaves_what_is_held() -> None:
    pool = BlockPool(3, 2)
    held, freed = filled(pool, [1, 2]), filled(pool, [3, 4])
    pool.truncate(freed, 0)
    pool.forget()
    assert pool.find(hashes_of([1, 2], 2)) == pool.find(hashes_of([3, 4], 2)) == []
    assert pool.num_used == 1
    pool.truncate(held, 0)
    assert pool.num_free == 3
