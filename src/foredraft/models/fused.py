"""Whole decoder layers as single calls of our CPU kernels: the same arithmetic as `decoder.Decoder` spells out, without
the way from Python to each kernel and back, which at one token a step takes as long as the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foredraft.kv.cache import KVCache
from foredraft.models import native
from foredraft.models.attention import NativeAttention
from foredraft.models.batch import ForwardBatch
from foredraft.models.config import ModelConfig
from foredraft.models.linear import NativeLinear

if TYPE_CHECKING:
    from foredraft.models.decoder import DecoderLayer


class FusedLayers:
    """Runs layers whose matrices all are `NativeLinear`.

    Args:
        config: of the model.
        layers: first to last; they must outlive this.
        attention: whose view of the batch is shared.
        dtype: of the KV cache.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[DecoderLayer], attention: NativeAttention, dtype: torch.dtype
    ) -> None:
        self._config, self._layers, self._attention = config, layers, attention
        kernel = native.address(f"fd_attention_{native.SUFFIX[dtype]}")
        self._structs = [_struct(config, layer, kernel) for layer in layers]
        heads = config.num_heads + 2 * config.num_kv_heads
        self._inner = max((layer.down.in_features for layer in layers), default=0)
        self._wide = max(heads * config.head_dim, 2 * self._inner)
        self._narrow = max(config.hidden_size, config.num_heads * config.head_dim, self._inner)
        self._spare = (config.num_heads + config.num_kv_heads) * config.head_dim if config.qk_norm else 0
        self._run = native.library().fd_layer

    @staticmethod
    def can_run(layers: Sequence[DecoderLayer]) -> bool:
        """Whether all matrices are in the kernels' formats."""
        return all(
            isinstance(part, NativeLinear)
            for layer in layers
            for part in (layer.qkv, layer.output, layer.gate_up, layer.down)
        )

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int]
    ) -> dict[int, Tensor]:
        """Runs all layers on `x` [T, d] float32 in place; returns the outputs of `feature_layers`.

        Args:
            cos, sin: [T, rotary_dim / 2] of the tokens.
        """
        config, count = self._config, len(x)
        wide, narrow = torch.empty(count, self._wide), torch.empty(count, self._narrow)
        spare = torch.empty(count, self._spare)
        struct = self._attention.struct(batch, config.num_heads, config.num_kv_heads, config.head_dim, cache.block_size)
        struct.scale = config.head_dim**-0.5
        pointers = [each.data_ptr() for each in (x, cos, sin)]
        scratch = [each.data_ptr() for each in (wide, narrow, spare)]
        threads = torch.get_num_threads()
        captured = {}
        for index, layer in enumerate(self._layers):
            struct.window = layer.sliding_window or 0
            kept = cache.keys(index).data_ptr(), cache.values(index).data_ptr()
            self._run(self._structs[index], struct, *pointers, *kept, *scratch, count, threads)
            if index in feature_layers:
                captured[index] = x.clone()
        return captured


def _struct(config: ModelConfig, layer: DecoderLayer, attention: int) -> native.LayerStruct:
    assert config.rope is not None
    struct = native.LayerStruct()
    struct.input_norm, struct.post_norm = layer.input_norm.data_ptr(), layer.post_norm.data_ptr()
    if layer.q_norm is not None and layer.k_norm is not None:
        struct.q_norm, struct.k_norm = layer.q_norm.data_ptr(), layer.k_norm.data_ptr()
    for name in ("qkv", "output", "gate_up", "down"):
        linear = getattr(layer, name)
        assert isinstance(linear, NativeLinear)
        setattr(struct, name, linear.struct)
    struct.attention = attention
    struct.heads, struct.kv_heads, struct.dim = config.num_heads, config.num_kv_heads, config.head_dim
    struct.half = config.rope.rotary_dim // 2
    struct.eps = config.rms_norm_eps
    return struct
