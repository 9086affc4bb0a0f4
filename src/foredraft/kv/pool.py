"""The block pool: which blocks of the KV cache are free, and which request owns the others.

Knows counts and ids only; the tensors live in `kv.cache`. Target and drafter caches share one pool, since both keep
the same token at the same slot.
"""

from __future__ import annotations


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
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def reserve(self, block_table: list[int], num_tokens: int) -> bool:
        """Grows `block_table` to hold `num_tokens` tokens; False, and nothing taken, when too few blocks are free."""
        missing = blocks_for(num_tokens, self.block_size) - len(block_table)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block_table.append(self._free.pop())
        return True

    def truncate(self, block_table: list[int], num_tokens: int) -> None:
        """Gives back the blocks of `block_table` past `num_tokens` tokens.

        This is all of a chain's rollback: what a rejected draft left in a block that stays is overwritten by the next
        token at that position before anything can attend to it.
        """
        keep = blocks_for(num_tokens, self.block_size)
        while len(block_table) > keep:
            self._free.append(block_table.pop())
