"""Counter-based noise: every number follows from (seed, position, stream, token id) and from nothing else.

So it does not depend on the batch, on earlier draws, or on how many tokens a step drafted. Streams keep the draws of
drafting, accepting and correcting independent of each other; the coupled rule uses one stream for draft and target on
purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_WEYL = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1


class Stream(IntEnum):
    """What a draw is for."""

    COUPLED = 1  # target and draft of the coupled rule
    DRAFT = 2  # drafting under the other rules
    ACCEPT = 3  # accepting a draft token
    FINAL = 4  # the recovered or bonus token


def uniforms(seeds: Sequence[int], positions: Sequence[int], stream: Stream) -> Tensor:
    """One draw in (0, 1) for each (seed, position), float64 [N]."""
    keys = _keys(seeds, positions, stream)
    return torch.from_numpy(((keys >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53)


def gumbel(
    seeds: Sequence[int], positions: Sequence[int], stream: Stream, vocab_size: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard Gumbel noise for every token of each (seed, position), float32 [N, vocab_size]."""
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    return gumbel_at(seeds, positions, stream, token_ids.expand(len(seeds), -1))


def gumbel_at(seeds: Sequence[int], positions: Sequence[int], stream: Stream, token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise of chosen tokens: `token_ids` [N, K], one row per (seed, position); float32 [N, K].

    A token has the noise that `gumbel` gives it.
    """
    keys = _keys(seeds, positions, stream)
    device = token_ids.device
    low = torch.from_numpy((keys & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)).to(device)[:, None]
    high = torch.from_numpy((keys >> np.uint64(32)).astype(np.uint32).view(np.int32)).to(device)[:, None]
    mixed = _mixed(token_ids.to(torch.int32) * -1640531527 ^ low) ^ high  # 0x9E3779B9 as int32
    mixed = _mixed(mixed)
    # u in (0, 1) from the small side: the rare, large values of the noise are the ones that must be finely resolved.
    small = (mixed.to(torch.float64) + (2.0**31 + 0.5)) * 2.0**-32
    exponential = -torch.log1p(-small).float()
    return -exponential.log()


def _keys(seeds: Sequence[int], positions: Sequence[int], stream: Stream) -> np.ndarray:
    """64 well-mixed bits for each (seed, position) in a stream, uint64 [N]: three rounds of SplitMix64."""
    seed = np.array([value & _MASK64 for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    keys = _splitmix(seed)
    keys = _splitmix(keys ^ position)
    return _splitmix(keys ^ np.uint64(stream))


def _splitmix(values: np.ndarray) -> np.ndarray:
    """Steele, Lea and Flood 2014: a bijection of 64 bits in which every input bit changes half of the output's."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(_WEYL)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _mixed(bits: Tensor) -> Tensor:
    """Wellons' 32-bit mixing function (lowbias32), on int32."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * 0x7FEB352D
    bits = bits ^ ((bits >> 15) & 0x1FFFF)
    bits = bits * -2073254261  # 0x846CA68B
    return bits ^ ((bits >> 16) & 0xFFFF)
