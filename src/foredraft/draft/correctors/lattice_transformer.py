"""`lattice`: LiLiCorr (2608.20530): a small transformer reads all γ×K candidates at once and gives each a
vector in and a vector out; the score of a step is their scaled cosine."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft.draft.correctors.corrector import FirstOrder, Sizes
from foredraft.draft.lattice import Chain


class LatticeTransformer(FirstOrder):
    """Edges from a two-layer transformer over the lattice's nodes, the anchor among them.

    Args:
        width: of the transformer.
        num_heads: of its attention.
        num_layers: of it.
        rank: of the vectors in and out.
    """

    prefix = "lattice."
    needs_embedding = True

    def __init__(
        self,
        sizes: Sizes,
        num_candidates: int | None = 16,
        width: int = 128,
        num_heads: int = 4,
        num_layers: int = 2,
        rank: int = 64,
    ) -> None:
        super().__init__(sizes, num_candidates)
        self.token = nn.Linear(sizes.hidden_size, width, bias=False)
        self.context = nn.Linear(sizes.hidden_size, width, bias=False)
        self.score = nn.Linear(1, width)
        self.slot = nn.Embedding(sizes.num_slots + 1, width)  # 0 is the anchor's
        self.layers = nn.ModuleList(_Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.ingoing = nn.Linear(width, rank, bias=False)
        self.outgoing = nn.Linear(width, rank, bias=False)
        self.scale = nn.Parameter(torch.zeros(sizes.num_slots))  # an exact no-op at first

    def edges(self, hidden: Tensor, previous: Tensor, candidates: Tensor | None, first_slot: int = 0) -> Tensor:
        raise NotImplementedError("a lattice's edges depend on all its nodes: see `lattice`")

    def lattice(self, unary_logits: Tensor, hidden: Tensor, anchor: Tensor, candidates: Tensor) -> Chain:
        batch, slots, width = candidates.shape
        by_slot = (batch, slots, width, -1)
        # A candidate that is masked out is a node like any other to the network, but may not make it
        # infinite.
        log_probs = unary_logits.float().log_softmax(-1).clamp(min=-30.0)
        nodes = self.token(self.embeddings(candidates)) + self.score(log_probs[..., None])
        nodes = nodes + (self.context(hidden) + self.slot.weight[1 : slots + 1])[:, :, None]  # [B, γ, K, w]
        root = self.token(self.embeddings(anchor)) + self.slot.weight[0]
        x = torch.cat([root[:, None], nodes.flatten(1, 2)], 1)  # [B, 1 + γ·K, w]
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        into = F.normalize(self.ingoing(x[:, 1:]), dim=-1).reshape(by_slot)
        out = F.normalize(self.outgoing(x), dim=-1)
        scale, unary = self.scale[:slots], self.unary(unary_logits)
        first = unary[:, 0] + scale[0] * (into[:, 0] @ out[:, 0, :, None])[..., 0]
        before = out[:, 1:].reshape(by_slot)[:, :-1]  # [B, γ-1, K, r]
        cosine = before @ into[:, 1:].transpose(-1, -2)
        return Chain(first, unary[:, 1:, None] + scale[1:, None, None] * cosine)

    def teacher_forced(
        self, unary_logits: Tensor, hidden: Tensor, previous: Tensor, candidates: Tensor | None = None
    ) -> Tensor:
        """As declared; a true token that is not among its slot's candidates has no vector, so that the slot
        after it keeps its unary scores."""
        assert candidates is not None, "a lattice needs candidates"
        chain = self.lattice(unary_logits, hidden, previous[:, 0], candidates)
        unary = self.unary(unary_logits)[:, 1:]
        taken = (candidates[:, :-1] == previous[:, 1:, None]).to(unary.dtype)  # [N, γ-1, K]
        known = taken.amax(-1, keepdim=True)
        taken = taken / taken.sum(-1, keepdim=True).clamp(min=1)
        bias = chain.edges - unary[:, :, None]
        bias = torch.where(bias.isnan(), 0.0, bias)  # -inf less -inf, of a column that is masked out
        scores = unary + known * (taken[:, :, None] @ bias)[:, :, 0]
        return torch.cat([chain.first[:, None], scores], 1)


class _Layer(nn.Module):
    """A pre-norm transformer layer in which every node sees every node."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.input_norm = nn.RMSNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.post_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        joint = self.qkv(self.input_norm(x)).reshape(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = joint.permute(2, 0, 3, 1, 4)  # each [B, heads, nodes, width / heads]
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.post_norm(x))))
