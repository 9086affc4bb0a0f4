"""Names for the text of full blocks, by which requests find what others have computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def extend_block_hashes(hashes: list[bytes], token_ids: Sequence[int], block_size: int) -> None:
    """Appends the hash of every full block of `token_ids` that `hashes` has none of yet.

    A block's hash covers all text up to its end, since its keys and values do. It is cryptographic: who chooses the
    tokens of one request must not be able to make it share the blocks of another's text.
    """
    for block in range(len(hashes), len(token_ids) // block_size):
        ids = array("q", token_ids[block * block_size : (block + 1) * block_size])
        hashes.append(sha256((hashes[-1] if hashes else b"") + ids.tobytes()).digest())
