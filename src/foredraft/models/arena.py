"""Memory for packed weights on huge pages: a decode step reads all of it, and 4 KiB pages cost about a fifth of its
time.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 32 << 20
ALIGNMENT = 64
HUGE_PAGE = 2 << 20

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


class Arena:
    """Hands out pieces of large anonymous mappings; a mapping is freed when all its pieces are."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros, 64-byte aligned."""
        num_bytes = num_elements * dtype.itemsize
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > len(self._chunk):
            self._chunk, start = _mapped(-(-max(num_bytes, CHUNK_BYTES) // HUGE_PAGE) * HUGE_PAGE), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used].view(dtype)


def _mapped(num_bytes: int) -> Tensor:
    """Zeros that begin on a huge page. Private, since the system keeps huge pages from shared mappings."""
    options = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, **options)
    if _HUGE_PAGES is not None:
        mapping.madvise(_HUGE_PAGES)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    return whole[start : start + num_bytes]


weights = Arena()
"""Where all packed weights of the process lie."""
