"""Embeddings: the mean of a model's hidden states over a text, as a unit vector.

Runs on whatever thread may use the model, a chunk at a time, over a cache of its own; drafting plays no part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from foredraft.kv.cache import KVCache
from foredraft.kv.pool import blocks_for
from foredraft.models.batch import ragged_batch
from foredraft.models.decoder import TargetModel

BLOCK_SIZE = 16


class Embedder:
    """Embeds texts with one model.

    Args:
        model: any causal language model.
        max_model_len: longest text in tokens.
        chunk_size: tokens in one forward.
    """

    def __init__(self, model: TargetModel, max_model_len: int, chunk_size: int) -> None:
        self.model = model
        self.max_model_len = max_model_len
        self._chunk_size = chunk_size
        self._num_blocks = blocks_for(max(max_model_len, chunk_size), BLOCK_SIZE)
        self._cache: KVCache | None = None

    @property
    def size(self) -> int:
        """Length of a vector."""
        return self.model.config.hidden_size

    def chunks(self, ids: Sequence[int]) -> Iterator[Callable[[], Tensor]]:
        """The forwards of one text, to be run one after the other; the last one gives the vector [hidden_size] float32.

        Each is a piece of work of bounded length, so that others may use the model in between; but no other text may
        be embedded before the last one has run.
        """
        total = torch.zeros(self.size, dtype=torch.float64)
        for start in range(0, len(ids), self._chunk_size):
            yield lambda start=start: self._forward(ids, start, total)  # type: ignore[misc]

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], start: int, total: Tensor) -> Tensor:
        if self._cache is None:
            self._cache = self.model.new_cache(self._num_blocks, BLOCK_SIZE)
        batch = ragged_batch(
            [ids[start : start + self._chunk_size]],
            [start],
            [range(self._num_blocks)],
            [1],
            block_size=BLOCK_SIZE,
            device=self.model.device,
        )
        hidden = self.model.forward(batch, self._cache).hidden  # [T, hidden_size]
        total += hidden.double().sum(0).cpu()
        return unit(total.float())


def unit(vector: Tensor) -> Tensor:
    """A vector [d] at length 1; one of zeros stays."""
    length = vector.norm()
    return vector / length if length > 0 else vector
