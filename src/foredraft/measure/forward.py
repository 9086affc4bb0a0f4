"""Single forwards of a target outside the engine: what it says after a text, and what a forward costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from foredraft.kv.cache import KVCache
from foredraft.kv.pool import blocks_for
from foredraft.measure.figures import Spread, spread
from foredraft.models.batch import ForwardBatch, ragged_batch
from foredraft.models.decoder import TargetModel

BLOCK_SIZE = 16


@dataclass(frozen=True)
class ForwardCost:
    """Median seconds of a target forward over 1 and over `num_tokens` tokens, and their ratio by pairs."""

    context: int
    num_tokens: int
    one_token_s: float
    tokens_s: float
    ratio: Spread


def next_logits(model: TargetModel, token_ids: Sequence[int]) -> Tensor:
    """The target's float32 logits [V] after `token_ids`, from a forward over all of them."""
    cache = model.new_cache(blocks_for(len(token_ids), BLOCK_SIZE), BLOCK_SIZE)
    return model.forward(sequence_batch(token_ids, 0, 1, model.device), cache).logits[0]


def forward_cost(
    model: TargetModel, *, context: int = 256, num_tokens: int = 8, repeats: int = 40, warmup: int = 5
) -> ForwardCost:
    """Times forwards over 1 and over `num_tokens` tokens, in turns, on a cache that holds `context` tokens.

    The context shrinks to what the model can hold. Logits are asked for at every token, as verification does.
    """
    context = max(1, min(context, model.config.max_model_len - num_tokens))
    cache = model.new_cache(blocks_for(context + num_tokens, BLOCK_SIZE), BLOCK_SIZE)
    ids = [(7 * place + 3) % model.config.vocab_size for place in range(context + num_tokens)]
    model.forward(sequence_batch(ids[:context], 0, 1, model.device), cache)
    batches = {
        size: sequence_batch(ids[context : context + size], context, size, model.device) for size in (1, num_tokens)
    }
    seconds: dict[int, list[float]] = {size: [] for size in batches}
    for turn in range(warmup + repeats):
        for size in (1, num_tokens) if turn % 2 else (num_tokens, 1):
            took = _timed(model, batches[size], cache)
            if turn >= warmup:
                seconds[size].append(took)
    ratios = [many / one for one, many in zip(seconds[1], seconds[num_tokens], strict=True)]
    return ForwardCost(context, num_tokens, median(seconds[1]), median(seconds[num_tokens]), spread(ratios))


def sequence_batch(token_ids: Sequence[int], start: int, num_logits: int, device: torch.device) -> ForwardBatch:
    """One request's tokens from position `start` on, in a cache of its own whose blocks it holds in order.

    Args:
        num_logits: how many of the last tokens have their logits computed.
    """
    blocks = list(range(blocks_for(start + len(token_ids), BLOCK_SIZE)))
    return ragged_batch([token_ids], [start], [blocks], [num_logits], block_size=BLOCK_SIZE, device=device)


def _timed(model: TargetModel, batch: ForwardBatch, cache: KVCache) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    start = perf_counter()
    model.forward(batch, cache)
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return perf_counter() - start
