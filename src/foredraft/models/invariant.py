"""Forwards of one fixed shape, for devices whose kernels give a token other bits in other company.

With our CPU kernels nothing of this is needed. Elsewhere the token at position p is always row p mod `WIDTH` of a
forward over exactly `WIDTH` rows of its own request, prompt or not, with keys padded to a multiple of `KEYS`. The same
kernels then do the same sums whether it is decoded alone, verified as a draft, recomputed after preemption or batched
with others. What that costs is one forward per `WIDTH` positions of each request: batching no longer shares the
reading of the weights, and a draft across a multiple of `WIDTH` takes two forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.errors import ConfigError
from foredraft.kv.cache import KVCache
from foredraft.models.attention import gathered
from foredraft.models.batch import ForwardBatch
from foredraft.models.decoder import Decoder, ForwardOutput, TargetModel

WIDTH = 16
KEYS = 256


class InvariantAttention:
    """Attention of `WIDTH` queries of one request over keys padded to a multiple of `KEYS`."""

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ForwardBatch,
        cache: KVCache,
        *,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        cache.write(layer, batch.slot_mapping, k, v)
        length = int(batch.seq_lens[0])
        padded = -(-length // KEYS) * KEYS
        found = gathered(layer, batch.block_tables[0], length, cache)
        keys, values = (F.pad(part.to(q.dtype), (0, 0, 0, padded - length)) for part in found)
        positions, key_positions = batch.positions, torch.arange(padded, device=q.device)
        mask = key_positions <= positions[:, None]
        if sliding_window is not None:
            mask &= positions[:, None] - key_positions < sliding_window
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )[0].transpose(0, 1)
        return out.reshape(q.shape[0], -1)


class InvariantModel:
    """A decoder that computes every token at one fixed shape.

    Raises `ConfigError` for models that run through transformers, whose forwards are not ours to shape.
    """

    is_row_invariant = True

    def __init__(self, model: TargetModel) -> None:
        if not isinstance(model, Decoder):
            raise ConfigError(
                "invariant: this model runs through transformers, which promises no fixed shapes; leave it out"
            )
        model.use_attention(InvariantAttention())
        self._model = model
        self.config = model.config
        self.dtype = model.dtype
        self.device = model.device
        self.weight_bytes = model.weight_bytes
        self.kv_bytes_per_token = model.kv_bytes_per_token
        self.new_cache = model.new_cache

    def forward(self, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int] = ()) -> ForwardOutput:
        """As `Decoder.forward`, in windows of `WIDTH` tokens; draft trees are refused before they get here."""
        assert batch.tree_mask is None
        hidden, features, logits = [], [], []
        wanted = set(batch.logits_indices.tolist())
        bounds = batch.query_start_loc.tolist()
        for request, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            start = begin
            while start < end:
                place = int(batch.positions[start]) % WIDTH
                count = min(WIDTH - place, end - start)
                output = self._model.forward(_window(batch, request, start, count), cache, feature_layers)
                hidden.append(output.hidden[place : place + count])
                features.append([layer[place : place + count] for layer in output.features])
                rows = [place + row - start for row in range(start, start + count) if row in wanted]
                logits.append(output.logits[rows])
                start += count
        layers = tuple(torch.cat(parts) for parts in zip(*features, strict=True))
        return ForwardOutput(torch.cat(hidden), layers, torch.cat(logits))


def _window(batch: ForwardBatch, request: int, start: int, count: int) -> ForwardBatch:
    """Tokens `start`.. of a request at the rows that their positions give them; what fills the others is not stored."""
    device = batch.input_ids.device
    first = int(batch.positions[start])
    rows = slice(first % WIDTH, first % WIDTH + count)
    input_ids = batch.input_ids[start].expand(WIDTH).clone()
    input_ids[rows] = batch.input_ids[start : start + count]
    slots = torch.full((WIDTH,), -1, dtype=torch.int64, device=device)
    slots[rows] = batch.slot_mapping[start : start + count]
    positions = torch.arange(WIDTH, device=device) + first // WIDTH * WIDTH
    limit = positions.clamp(max=first + count - 1)  # rows past the last token stay within the rotary tables
    return ForwardBatch(
        input_ids=input_ids,
        positions=limit,
        slot_mapping=slots,
        query_start_loc=torch.tensor([0, WIDTH], device=device),
        seq_lens=torch.tensor([first + count], device=device),
        block_tables=batch.block_tables[request : request + 1],
        logits_indices=torch.arange(WIDTH, device=device),
    )
