"""Which blocks of a drafter's own cache hold its context for a whole block of text.

The drafter's cache has the geometry of the target's, so a request that reuses the target's blocks finds the drafter's
context in the same places, if the drafter wrote it there and nothing else since. Blocks are compared by the hash of
their text, so that nobody has to say when the pool gives one to another request.
"""

from __future__ import annotations

from collections.abc import Sequence


class ContextBlocks:
    """The record that a drafter keeps of its cache; every write to the cache goes into it.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._texts: dict[int, bytes] = {}

    def num_blocks(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """Leading blocks of a request that hold its context already.

        Args:
            block_table: its blocks.
            block_hashes: hashes of its full blocks' text, in order.
        """
        count = 0
        for block, block_hash in zip(block_table, block_hashes, strict=False):
            if self._texts.get(block) != block_hash:
                break
            count += 1
        return count

    def wrote(
        self, block_table: Sequence[int], block_hashes: Sequence[bytes], start: int, committed: int, stop: int
    ) -> None:
        """Notes a write at a request's positions from `start` to `stop`; those below `committed` are context, and so is
        everything before `start`."""
        size = self._block_size
        for index in range(start // size, -(-stop // size)):
            if (index + 1) * size <= committed and index < len(block_hashes):
                self._texts[block_table[index]] = block_hashes[index]
            else:
                self._texts.pop(block_table[index], None)
