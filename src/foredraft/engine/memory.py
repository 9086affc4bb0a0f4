"""How many bytes the KV cache may take: as told, or measured.

On CUDA a forward's own memory is too large to guess, so a share of the device is given to the cache only after the
largest forward has run.
"""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import torch

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.kv.pool import blocks_for
from foredraft.models.batch import ForwardBatch, ragged_batch
from foredraft.models.decoder import TargetModel

SHARE_OF_FREE_MEMORY = 0.25
MIB = 2**20


def cache_bytes(config: EngineConfig, models: Sequence[TargetModel]) -> int:
    """Bytes for the KV cache of `models`, which are loaded; raises `ConfigError` when the share leaves none."""
    device = models[0].device
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if config.gpu_memory_utilization is None:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        return int(free * SHARE_OF_FREE_MEMORY)
    peak = max(_forward_peak(model, config) for model in models)
    free, total = torch.cuda.mem_get_info(device)
    return left_for_cache(
        config.gpu_memory_utilization,
        total=total,
        others=total - free - torch.cuda.memory_reserved(device),
        peak=peak,
    )


def left_for_cache(share: float, *, total: int, others: int, peak: int) -> int:
    """What is left of `share` of a device's `total` bytes.

    Args:
        others: bytes of other processes and of the driver.
        peak: bytes of this process at the height of the largest forward, weights included, cache excluded.
    """
    left = int(total * share) - others - peak
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization: {share:g} of the device's {total // MIB} MiB leaves nothing for the KV cache: "
            f"weights and a forward take {peak // MIB} MiB, and others {others // MIB} MiB; raise it, or lower "
            "max_num_batched_tokens"
        )
    return left


def _forward_peak(model: TargetModel, config: EngineConfig) -> int:
    """Bytes allocated on a CUDA device at the height of the largest forward, its cache excluded."""
    batch, num_blocks = largest_batch(model, config)
    cache = model.new_cache(num_blocks, config.block_size)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    with torch.inference_mode():
        logits = model.forward(batch, cache).logits
        logits.softmax(-1).sort(-1)  # the sampler's largest transform
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - cache.nbytes
    del batch, cache, logits
    torch.cuda.empty_cache()
    return peak


def largest_batch(model: TargetModel, config: EngineConfig) -> tuple[ForwardBatch, int]:
    """The forward that takes most memory, with the blocks that it needs: as many tokens as a step may have, of as many
    requests, each with as many logits as a draft has."""
    gamma = config.speculative.num_speculative_tokens if config.speculative is not None else 0
    limit = min(config.max_model_len or model.config.max_model_len, model.config.max_model_len)
    count, more = divmod(config.max_num_batched_tokens, config.max_num_seqs)
    lengths = [min(limit, count + (place < more)) for place in range(config.max_num_seqs)]
    blocks = [blocks_for(length, config.block_size) for length in lengths]
    starts = [sum(blocks[:place]) for place in range(len(blocks))]
    batch = ragged_batch(
        [[0] * length for length in lengths],
        [0] * len(lengths),
        [list(range(start, start + held)) for start, held in zip(starts, blocks, strict=True)],
        [min(length, gamma + 1) for length in lengths],
        block_size=config.block_size,
        device=model.device,
    )
    return batch, sum(blocks)
