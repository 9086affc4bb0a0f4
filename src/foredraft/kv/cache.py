"""The tensors of a paged KV cache. Who owns which block is `kv.pool`'s business."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers in fixed-size blocks.

    A slot is `block_id * block_size + offset`. Memory is not touched before a slot is written, so blocks that were
    never used cost no resident memory.

    Layout: `k` is [num_layers, num_blocks, num_kv_heads, head_dim, block_size] and `v` [num_layers, num_blocks,
    num_kv_heads, block_size, head_dim], so that scores of neighbouring keys are one vector and outputs are another.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        heads = (num_layers, num_blocks, num_kv_heads)
        self.k = torch.empty(*heads, head_dim, block_size, dtype=dtype, device=device)
        self.v = torch.empty(*heads, block_size, head_dim, dtype=dtype, device=device)
        self._layers = [(self.k[layer], self.v[layer]) for layer in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of address space; resident memory grows with the blocks used."""
        return self.k.nbytes + self.v.nbytes

    def keys(self, layer: int) -> Tensor:
        """Keys of a layer [num_blocks, num_kv_heads, head_dim, block_size]."""
        return self._layers[layer][0]

    def values(self, layer: int) -> Tensor:
        """Values of a layer [num_blocks, num_kv_heads, block_size, head_dim]."""
        return self._layers[layer][1]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores `k` and `v` [n, num_kv_heads, head_dim] at `slots` [n]; -1 stores nothing."""
        if bool((slots < 0).any()):
            stored = slots >= 0
            slots, k, v = slots[stored], k[stored], v[stored]
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self.keys(layer)[blocks, :, :, offsets] = k.to(self.k.dtype)
        self.values(layer)[blocks, :, offsets] = v.to(self.v.dtype)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [n, num_kv_heads, head_dim] at `slots` [n]."""
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return self.keys(layer)[blocks, :, :, offsets], self.values(layer)[blocks, :, offsets]

    def copy_slots(self, source: Tensor, destination: Tensor) -> None:
        """Copies slots `source` [n] to `destination` [n] in every layer, as if all at once."""
        from_blocks, from_offsets = source // self.block_size, source % self.block_size
        to_blocks, to_offsets = destination // self.block_size, destination % self.block_size
        self.k[:, to_blocks, :, :, to_offsets] = self.k[:, from_blocks, :, :, from_offsets]
        self.v[:, to_blocks, :, to_offsets] = self.v[:, from_blocks, :, from_offsets]
