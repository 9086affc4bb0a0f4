"""One decoder for Llama and its kin: what is computed in which order, not how.

Knows nothing of files (see `weights`) or requests: a `ForwardBatch` says which tokens stand where, a
`KVCache` holds what came before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.errors import ModelError
from foredraft.kv.cache import KVCache
from foredraft.models.attention import Attention, NativeAttention, make_attention
from foredraft.models.batch import ForwardBatch
from foredraft.models.config import ModelConfig
from foredraft.models.fused import FusedLayers
from foredraft.models.linear import Linear
from foredraft.models.ops import apply_rope, rms_norm, silu_mul
from foredraft.models.rope import rope_tables


@dataclass(frozen=True)
class ForwardOutput:
    """What one forward gives.

    Args:
        hidden: after the final norm, [T, hidden_size].
        features: outputs of the layers asked for, in that order, before the final norm, each [T,
            hidden_size].
        logits: float32 [N, vocab_size], for `batch.logits_indices` only.
    """

    hidden: Tensor
    features: tuple[Tensor, ...]
    logits: Tensor


class TargetModel(Protocol):
    """What the engine asks of a model, target or draft: `Decoder`, or `HFModel` for other architectures."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    @property
    def is_row_invariant(self) -> bool: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int: ...

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache: ...

    def forward(self, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int] = ()) -> ForwardOutput: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer's weights; queries, keys and values share a matrix, and so do gate and up."""

    input_norm: Tensor  # [d]
    qkv: Linear  # d -> (Hq + 2 Hkv) D
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    output: Linear  # Hq D -> d
    post_norm: Tensor  # [d]
    gate_up: Linear  # d -> 2 I
    down: Linear  # I -> d
    sliding_window: int | None


class Decoder:
    """A Llama-style causal language model over a paged KV cache.

    Args:
        config: sizes; `config.rope` must be set.
        embedding: [vocab_size, hidden_size] in `dtype`, or None when the head's rows are the embedding
            (tied).
        layers: first to last.
        norm: the final norm's weight [hidden_size].
        head: hidden_size -> vocab_size.
        dtype: of weights and KV cache.
        device: where all of it lies.
        rope: cos and sin tables, made from `config.rope` when None.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor | None,
        layers: Sequence[DecoderLayer],
        norm: Tensor,
        head: Linear,
        dtype: torch.dtype,
        device: torch.device,
        rope: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        assert config.rope is not None
        self.config = config
        self.dtype = dtype
        self.device = device
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        # On the CPU activations stay in float32: a bfloat16 weight is then the only rounding.
        self.activation_dtype = torch.float32 if device.type == "cpu" else dtype
        self.cos, self.sin = rope or rope_tables(config.rope, config.max_model_len, device)
        self._attention: Attention = make_attention(device, dtype)
        kv_size = config.num_kv_heads * config.head_dim
        self._fused: FusedLayers | None = None
        if isinstance(self._attention, NativeAttention) and FusedLayers.can_run(self.layers):
            self._fused = FusedLayers(config, self.layers, self._attention, dtype)
        self._split = [config.num_heads * config.head_dim, kv_size, kv_size]
        self._scale = config.head_dim**-0.5

    @property
    def is_row_invariant(self) -> bool:
        """Whether a token's results have the same bits whatever else is in the forward, as our CPU kernels see to."""
        return isinstance(self._attention, NativeAttention)

    def use_attention(self, attention: Attention) -> None:
        """Attends with `attention` from now on."""
        self._attention = attention
        self._fused = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory; a tied head counts once."""
        total = self.head.nbytes + self.norm.nbytes
        total += self.embedding.nbytes if self.embedding is not None else 0
        for layer in self.layers:
            total += sum(part.nbytes for part in (layer.qkv, layer.output, layer.gate_up, layer.down))
            total += layer.input_norm.nbytes + layer.post_norm.nbytes
            total += sum(norm.nbytes for norm in (layer.q_norm, layer.k_norm) if norm is not None)
        return total

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""
        config = self.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim * self.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty KV cache of `num_blocks` blocks of `block_size` tokens."""
        config = self.config
        return KVCache(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] to embeddings [T, hidden_size] in the activation dtype."""
        rows = self.head.rows(token_ids) if self.embedding is None else F.embedding(token_ids, self.embedding)
        return rows.to(self.activation_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states after the final norm [N, hidden_size] to float32 logits [N, vocab_size]."""
        return self.head(hidden).float()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int] = ()) -> ForwardOutput:
        """Runs all tokens of `batch`, writing their keys and values to `cache`.

        Args:
            batch: T tokens of B requests, and the N of them whose logits are wanted.
            cache: from `new_cache`; holds each request's earlier tokens.
            feature_layers: layers whose outputs are wanted, 0 the first.
        """
        x = self.embed(batch.input_ids)  # [T, d]
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]  # [T, rotary_dim / 2]
        if self._fused is not None:
            captured = self._fused.forward(x, cos, sin, batch, cache, feature_layers)
        else:
            x, captured = self._layer_by_layer(x, cos, sin, batch, cache, feature_layers)
        hidden = rms_norm(x, self.norm, self.config.rms_norm_eps)
        features = tuple(captured[index] for index in feature_layers)
        return ForwardOutput(hidden, features, self.logits(hidden[batch.logits_indices]))

    def _layer_by_layer(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The layers on any device and weight format; `FusedLayers` does the same in fewer calls."""
        config, eps, scale, attend, split = (
            self.config,
            self.config.rms_norm_eps,
            self._scale,
            self._attention,
            self._split,
        )
        heads, kv_heads, head_dim, num_tokens = config.num_heads, config.num_kv_heads, config.head_dim, len(x)
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self.layers):
            q, k, v = torch.split(layer.qkv(rms_norm(x, layer.input_norm, eps)), split, dim=-1)
            q = q.view(num_tokens, heads, head_dim)
            k = k.view(num_tokens, kv_heads, head_dim)
            v = v.view(num_tokens, kv_heads, head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
            q, k = apply_rope(q, k, cos, sin)
            mixed = attend(index, q, k, v, batch, cache, scale=scale, sliding_window=layer.sliding_window)
            x = layer.output(mixed, residual=x)
            gated = silu_mul(layer.gate_up(rms_norm(x, layer.post_norm, eps)))
            x = layer.down(gated, residual=x)
            if index in feature_layers:
                captured[index] = x
        return x, captured


def truncated(model: Decoder, num_layers: int) -> Decoder:
    """The first `num_layers` layers of `model` with its final norm and head, sharing all weights with it.

    The cheapest draft model that needs no training; its KV cache is its own.

    Raises:
        ModelError: fewer than 1 layer, or more than the model has.
    """
    if not 1 <= num_layers <= model.config.num_layers:
        raise ModelError(f"cannot keep {num_layers} layers of a model that has {model.config.num_layers}")
    config = replace(model.config, num_layers=num_layers, sliding_windows=model.config.sliding_windows[:num_layers])
    return Decoder(
        config,
        embedding=model.embedding,
        layers=model.layers[:num_layers],
        norm=model.norm,
        head=model.head,
        dtype=model.dtype,
        device=model.device,
        rope=(model.cos, model.sin),
    )
