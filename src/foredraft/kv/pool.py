"""The block pool: which blocks of the KV cache are free, which requests hold the others, and what text they keep.

Knows counts, ids and digests only; the tensors live in `kv.cache`. Target and drafter caches share one pool, since both
keep the same token at the same slot.

A block that is full of committed tokens can be published under the hash of the text up to its end. From then on nobody
writes to it, so that any request whose text begins alike may hold it too: nothing ever needs copying on a write. A
published block that nobody holds is free, and found until its memory is wanted; the one unused for longest goes first.
"""

from __future__ import annotations

from collections.abc import Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens need."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Hands out fixed-size blocks; a request's block table is a plain list of block ids.

    Args:
        num_blocks: blocks in all.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, with nothing worth finding
        self._kept: dict[int, None] = {}  # free and published, the one unused for longest first
        self._hashes: dict[int, bytes] = {}  # published blocks
        self._published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_holders(self, block: int) -> int:
        """Block tables that hold `block`."""
        return self._holders[block]

    def is_published(self, block: int) -> bool:
        """Whether other requests may find `block`, so that nothing may be written to it."""
        return block in self._hashes

    def reserve(self, block_table: list[int], num_tokens: int, reused: Sequence[int] = ()) -> bool:
        """Grows `block_table` to hold `num_tokens` tokens; False, and nothing taken, when too few blocks are free.

        `reused` are published blocks from `find` for the beginning of a text, whose table is still empty.
        """
        assert not (reused and block_table)
        missing = blocks_for(num_tokens, self.block_size) - len(block_table) - len(reused)
        if missing > self.num_free - sum(block in self._kept for block in reused):
            return False
        for block in reused:
            self._kept.pop(block, None)
            self._holders[block] += 1
            block_table.append(block)
        for _ in range(missing):
            block = self._empty.pop() if self._empty else self._evict()
            self._holders[block] = 1
            block_table.append(block)
        return True

    def truncate(self, block_table: list[int], num_tokens: int) -> None:
        """Gives back the blocks of `block_table` past `num_tokens` tokens.

        This is all of a chain's rollback: what a rejected draft left in a block that stays is overwritten by the next
        token at that position before anything can attend to it.
        """
        keep = blocks_for(num_tokens, self.block_size)
        # A text's last block goes first, and so is evicted first: what comes before it is of use without it.
        while len(block_table) > keep:
            block = block_table.pop()
            self._holders[block] -= 1
            if self._holders[block] == 0:
                if block in self._hashes:
                    self._kept[block] = None
                else:
                    self._empty.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Lets others find a held block that is full of committed tokens, and will not be written again."""
        assert self._holders[block] > 0
        assert self._hashes.get(block, block_hash) == block_hash, "a published block was filled with something else"
        # Two requests may have computed the same text side by side; the block that came first stays.
        if self._published.setdefault(block_hash, block) == block:
            self._hashes[block] = block_hash

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The published blocks of the longest beginning of `hashes` that has them all."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._published.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def forget(self) -> None:
        """Withdraws every published block; those that requests hold stay with them."""
        self._empty += self._kept
        self._kept.clear()
        self._hashes.clear()
        self._published.clear()

    def _evict(self) -> int:
        block = next(iter(self._kept))
        del self._kept[block]
        del self._published[self._hashes.pop(block)]
        return block
