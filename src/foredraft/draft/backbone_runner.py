"""The backbone's inference form: packed weights, our kernels, and a paged cache of the context's keys and
values.

The cache has the target's block tables. Only committed positions are kept: a block writes its keys and values
past them, where the next context overwrites them before anything reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.draft.backbone import Backbone, Layer, rotated
from foredraft.draft.convolution import CausalConvolution
from foredraft.kv.cache import KVCache
from foredraft.models.attention import make_attention
from foredraft.models.batch import ForwardBatch, ragged_batch
from foredraft.models.linear import Linear, pack_linear
from foredraft.models.ops import apply_rope, rms_norm, silu_mul
from foredraft.models.rope import rope_tables


@dataclass(frozen=True)
class _PackedLayer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear
    attention_conv: CausalConvolution | None
    mlp_conv: CausalConvolution | None


class BackboneRunner:
    """Runs blocks of ragged requests.

    Args:
        backbone: trained weights; copied.
        dtype: of weights and cache, as the target's.
        max_model_len: longest text in tokens.
    """

    def __init__(self, backbone: Backbone, *, dtype: torch.dtype, device: torch.device, max_model_len: int) -> None:
        config = self.config = backbone.config
        self.dtype, self.device = dtype, device
        self.activation_dtype = torch.float32 if device.type == "cpu" else dtype

        def packed(*weights: Tensor) -> Linear:
            return pack_linear(torch.cat([weight.detach() for weight in weights]), None, dtype=dtype, device=device)

        def norm(module: torch.nn.RMSNorm) -> Tensor:
            return module.weight.detach().to(device, self.activation_dtype)

        def head_norm(module: torch.nn.RMSNorm | None) -> Tensor | None:
            return None if module is None else norm(module)

        layers = [layer for layer in backbone.layers if isinstance(layer, Layer)]
        self._fc = packed(backbone.fc.weight)
        self._hidden_norm, self._norm = norm(backbone.hidden_norm), norm(backbone.norm)
        self._layers = [
            _PackedLayer(
                input_norm=norm(layer.input_layernorm),
                qkv=packed(*(part.weight for part in _projections(layer))),
                q_norm=head_norm(layer.self_attn.q_norm),
                k_norm=head_norm(layer.self_attn.k_norm),
                output=packed(layer.self_attn.o_proj.weight),
                post_norm=norm(layer.post_attention_layernorm),
                gate_up=packed(layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight),
                down=packed(layer.mlp.down_proj.weight),
                attention_conv=_moved(layer.attention_conv, device, self.activation_dtype),
                mlp_conv=_moved(layer.mlp_conv, device, self.activation_dtype),
            )
            for layer in layers
        ]
        # Every layer's context keys and values follow from the same rows: one matrix for all, at the price of
        # a second copy of a small part of the weights.
        self._context_kv = packed(*(part.weight for layer in layers for part in _projections(layer)[1:]))
        self._carry = None if backbone.carry is None else packed(backbone.carry.weight)
        own = backbone.mask_embedding
        self._mask = None if own is None else own.detach().to(device, self.activation_dtype)
        self._cos, self._sin = rope_tables(config.rope, max_model_len + config.block_size, device)
        self._attention = make_attention(device, dtype)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the context cache, over all layers."""
        return self.config.kv_values_per_token * self.dtype.itemsize

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """An empty context cache with the geometry of the target's block tables."""
        config = self.config
        shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        return KVCache(*shape, self.dtype, self.device)

    def context(self, features: Tensor) -> Tensor:
        """Concatenated target features [n, m·d] to context rows [n, d]."""
        projected = self._fc(features.to(self.activation_dtype))
        return rms_norm(projected, self._hidden_norm, self.config.rms_norm_eps)

    def write_context(self, context: Tensor, positions: Tensor, slots: Tensor, cache: KVCache) -> None:
        """Stores every layer's keys and values of context rows [n, d] that stand at `positions` in the
        text."""
        config = self.config
        shape = (len(context), config.num_layers, 2, config.num_kv_heads, config.head_dim)
        keys_and_values = self._context_kv(context).reshape(shape)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for index, layer in enumerate(self._layers):
            keys, values = keys_and_values[:, index, 0], keys_and_values[:, index, 1]
            if layer.k_norm is not None:
                keys = rms_norm(keys.contiguous(), layer.k_norm, config.rms_norm_eps)
            cache.write(index, slots, rotated(keys, cos, sin), values)

    def block_batch(
        self,
        anchors: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        num_drafts: Sequence[int],
        block_size: int,
    ) -> ForwardBatch:
        """The blocks of requests: anchors at `starts`, then as many masks as `num_drafts` needs, each block
        seeing all of itself; `logits_indices` are the slots that predict."""
        config = self.config
        mask_id = config.mask_token_id if config.mask_token_id is not None else 0
        num_masks = [count - 1 + config.first_predicting for count in num_drafts]
        tokens = [[anchor] + [mask_id] * count for anchor, count in zip(anchors, num_masks, strict=True)]
        batch = ragged_batch(tokens, starts, block_tables, num_drafts, block_size=block_size, device=self.device)
        widest = max(num_masks) + 1
        visible = torch.ones(len(batch.input_ids), widest, dtype=torch.bool, device=self.device)
        return replace(batch, tree_mask=visible)

    def forward(self, embeddings: Tensor, batch: ForwardBatch, cache: KVCache, carried: Tensor | None = None) -> Tensor:
        """Hidden states of the slots that predict [N, d], after the final norm.

        Args:
            embeddings: [T, d], the target's, of `batch.input_ids`.
            batch: from `block_batch`.
            cache: holds each request's context up to its anchor.
            carried: [B, d], each request's context row before its anchor, for a backbone with a carry.
        """
        config, eps = self.config, self.config.rms_norm_eps
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        split = [heads * size, kv_heads * size, kv_heads * size]
        x = embeddings.to(self.activation_dtype)
        if self._mask is not None:
            x = self._mask.repeat(len(x), 1)
            firsts = batch.query_start_loc[:-1]
            x[firsts] = embeddings[firsts].to(x.dtype)
        if self._carry is not None:
            assert carried is not None
            x = x + self._carry(carried).repeat_interleave(batch.query_start_loc.diff(), 0)
        num_rows = len(x)
        rows = _Rows(batch) if config.conv_taps else None
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        for index, layer in enumerate(self._layers):
            inner, kernel = _prepared(layer.attention_conv, rms_norm(x, layer.input_norm, eps), rows)
            q, k, v = torch.split(layer.qkv(inner), split, dim=-1)
            q, k = q.view(num_rows, heads, size), k.view(num_rows, kv_heads, size)
            v = v.view(num_rows, kv_heads, size)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
            q, k = apply_rope(q, k, cos, sin)
            mixed = self._attention(index, q, k, v, batch, cache, scale=size**-0.5, sliding_window=None)
            x = _finished(layer.attention_conv, layer.output, mixed, x, kernel, rows)
            inner, kernel = _prepared(layer.mlp_conv, rms_norm(x, layer.post_norm, eps), rows)
            x = _finished(layer.mlp_conv, layer.down, silu_mul(layer.gate_up(inner)), x, kernel, rows)
        return rms_norm(x[batch.logits_indices], self._norm, eps)


class _Rows:
    """Ragged rows [T, d] to padded blocks [B, n, d] and back; what pads a block lies behind it, where no
    causal convolution looks."""

    def __init__(self, batch: ForwardBatch) -> None:
        starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
        offsets = torch.arange(int((ends - starts).max()), device=starts.device)
        self._padded = torch.minimum(starts[:, None] + offsets, ends[:, None] - 1)  # [B, n]
        self._inside = offsets < (ends - starts)[:, None]

    def blocks(self, x: Tensor) -> Tensor:
        return x[self._padded]

    def rows(self, x: Tensor) -> Tensor:
        return x[self._inside]


def _prepared(convolution: CausalConvolution | None, x: Tensor, rows: _Rows | None) -> tuple[Tensor, Tensor | None]:
    if convolution is None or rows is None:
        return x, None
    mixed, kernel = convolution.prepare(rows.blocks(x))
    return rows.rows(mixed), kernel


def _finished(
    convolution: CausalConvolution | None,
    linear: Linear,
    inner: Tensor,
    residual: Tensor,
    kernel: Tensor | None,
    rows: _Rows | None,
) -> Tensor:
    """A sublayer's last linear layer, the convolution of what it gives, and the residual."""
    if convolution is None or rows is None or kernel is None:
        return linear(inner, residual=residual)
    return residual + rows.rows(convolution.finish(rows.blocks(linear(inner)), kernel))


def _projections(layer: Layer) -> tuple[torch.nn.Linear, torch.nn.Linear, torch.nn.Linear]:
    return layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj


def _moved(convolution: CausalConvolution | None, device: torch.device, dtype: torch.dtype) -> CausalConvolution | None:
    if convolution is None:
        return None
    copy = CausalConvolution(convolution.base_kernel.shape[-1], convolution.taps, convolution.group_size)
    copy.load_state_dict(convolution.state_dict())
    return copy.requires_grad_(False).to(device, dtype)
