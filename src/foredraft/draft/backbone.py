"""The block-parallel backbone in its training form: torch modules, many anchors at once, context shared
between them.

Source: DFlash (2602.06036). Outputs of a few target layers are concatenated, projected and normed: the
context. Every layer attends to [context before the anchor; block], the block sees all of itself, and γ drafts
come from one pass. DSpark's variant lets the anchor's slot predict too. The inference form is
`backbone_runner`; both share these weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.draft.backbone_config import BlockConfig
from foredraft.draft.convolution import CausalConvolution
from foredraft.models.rope import rope_tables
from foredraft.models.weights import Weights


class Attention(nn.Module):
    """A block's attention to its context and to itself; q and k norms per head where the configuration has
    them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, context: Tensor, rotary: Rotary, visible: Tensor) -> Tensor:
        """Attends.

        Args:
            x: [B, A, n, d], blocks of A anchors.
            context: [B, S, d].
            rotary: of both.
            visible: [B, 1, A·n, S + A·n] bool, from `visible_keys`.
        """
        batch, anchors, inputs, _ = x.shape
        heads, shared, size = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        q = rotary.block(_normed(self.q_proj(x).reshape(batch, anchors, inputs, heads, size), self.q_norm))
        k_block = rotary.block(_normed(self.k_proj(x).reshape(batch, anchors, inputs, shared, size), self.k_norm))
        k_context = rotary.context(_normed(self.k_proj(context).reshape(batch, -1, shared, size), self.k_norm))
        keys = torch.cat([k_context, k_block.flatten(1, 2)], 1).transpose(1, 2)  # [B, Hkv, S + A·n, D]
        values = torch.cat([self.v_proj(context), self.v_proj(x).flatten(1, 2)], 1)
        values = values.reshape(batch, -1, shared, size).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            q.flatten(1, 2).transpose(1, 2), keys, values, attn_mask=visible, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, anchors, inputs, heads * size))


def visible_keys(anchors: Tensor, length: int, inputs: int) -> Tensor:
    """What each input of a packed batch sees [B, 1, A·n, S + A·n]: the context before its anchor, and its own block.

    Args:
        anchors: [B, A] positions.
        length: S, of the context.
        inputs: n, of a block.
    """
    batch, count = anchors.shape
    before = torch.arange(length, device=anchors.device) < anchors[..., None]  # [B, A, S]
    own = torch.eye(count, dtype=torch.bool, device=anchors.device).repeat_interleave(inputs, 1)  # [A, A·n]
    rows = torch.cat([before, own.expand(batch, -1, -1)], -1).repeat_interleave(inputs, 1)
    return rows[:, None]


class Mlp(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A pre-norm decoder layer, with convolutions around its sublayers where the configuration has them."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        convolution = (config.hidden_size, config.conv_taps, config.conv_group_size)
        self.attention_conv = CausalConvolution(*convolution) if config.conv_taps else None
        self.mlp_conv = CausalConvolution(*convolution) if config.conv_taps else None

    def forward(self, x: Tensor, context: Tensor, rotary: Rotary, visible: Tensor) -> Tensor:
        inner = self.input_layernorm(x)
        if self.attention_conv is None:
            x = x + self.self_attn(inner, context, rotary, visible)
        else:
            inner, kernel = self.attention_conv.prepare(inner)
            x = x + self.attention_conv.finish(self.self_attn(inner, context, rotary, visible), kernel)
        inner = self.post_attention_layernorm(x)
        if self.mlp_conv is None:
            return x + self.mlp(inner)
        inner, kernel = self.mlp_conv.prepare(inner)
        return x + self.mlp_conv.finish(self.mlp(inner), kernel)


class Backbone(nn.Module):
    """The trained network between the target's features and the target's head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.carry = None
        if config.carry:  # starts as if it were not there
            self.carry = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.carry.weight)
        self.mask_embedding = None
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.randn(config.hidden_size) * 0.02)

    def context(self, features: Tensor) -> Tensor:
        """Concatenated target features [..., m·d] to what the layers attend to [..., d]."""
        return self.hidden_norm(self.fc(features).to(self.hidden_norm.weight.dtype))

    def forward(
        self,
        features: Tensor,
        anchors: Tensor,
        anchor_embeddings: Tensor,
        mask_embedding: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the slots that predict [B, A, γ, d], after the final norm.

        Args:
            features: [B, S, m·d], of whole sequences.
            anchors: [B, A], the anchors' positions, from 1 on; each sees the features before it. Sequences shorter
                than S need no mask, since no anchor lies past their end.
            anchor_embeddings: [B, A, d], the target's.
            mask_embedding: [d], the target's embedding of the mask token, when the backbone has none of its
                own.
        """
        config = self.config
        mask = self.mask_embedding if self.mask_embedding is not None else mask_embedding
        assert mask is not None, "the embedding of the mask token is needed"
        masks = mask.to(anchor_embeddings.dtype).expand(*anchors.shape, config.block_size - 1, -1)
        x = torch.cat([anchor_embeddings[:, :, None], masks], 2)  # [B, A, n, d]
        context = self.context(features)
        if self.carry is not None:
            rows = torch.arange(len(anchors), device=anchors.device)[:, None]
            x = x + self.carry(context[rows, anchors - 1])[:, :, None]
        rotary = Rotary(config, anchors, features.shape[1])
        visible = visible_keys(anchors, features.shape[1], config.block_size)
        for layer in self.layers:
            x = layer(x, context, rotary, visible)
        return self.norm(x)[:, :, config.first_predicting :]


class Rotary:
    """Rotary tables of a packed batch: blocks at their anchors' positions, and the context from 0 on."""

    def __init__(self, config: BlockConfig, anchors: Tensor, length: int) -> None:
        longest = length + config.block_size
        cos, sin = rope_tables(config.rope, longest, anchors.device)
        positions = anchors[..., None] + torch.arange(config.block_size, device=anchors.device)  # [B, A, n]
        self._block = cos[positions][..., None, :], sin[positions][..., None, :]
        self._context = cos[:length, None], sin[:length, None]

    def block(self, x: Tensor) -> Tensor:
        """Rotates [B, A, n, heads, D]."""
        return rotated(x, *self._block)

    def context(self, x: Tensor) -> Tensor:
        """Rotates [B, S, heads, D]."""
        return rotated(x, *self._context)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `models.ops.apply_rope`, but never in place, so that gradients flow."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _normed(x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
    return x if norm is None else norm(x.to(norm.weight.dtype)).to(x.dtype)


@torch.no_grad()
def start_from_target(backbone: Backbone, weights: Weights, layers: list[int]) -> None:
    """Copies the target's `layers` into the backbone's, in order, and its final norm.

    The context starts as the mean of the features, normed as the first copied layer norms its input. Biases
    of a target are left out.

    Args:
        weights: the target's checkpoint; its layers have the backbone's shape.
    """
    config = backbone.config
    assert len(layers) == config.num_layers, "one target layer for each layer of the backbone"
    for layer, source in zip(backbone.layers, layers, strict=True):
        for name, parameter in layer.named_parameters():
            full = f"model.layers.{source}.{name}"
            if full in weights.shapes:
                parameter.copy_(weights.read(full, torch.float32))
    backbone.norm.weight.copy_(weights.read("model.norm.weight", torch.float32))
    first = weights.read(f"model.layers.{layers[0]}.input_layernorm.weight", torch.float32)
    backbone.hidden_norm.weight.copy_(first)
    share = torch.eye(config.hidden_size) / len(config.target_layers)
    backbone.fc.weight.copy_(share.repeat(1, len(config.target_layers)))
