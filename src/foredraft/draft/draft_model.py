"""An ordinary smaller causal LM as drafter: γ forwards of one token each, after one that catches up.

Its KV cache has tensors of its own but shares the target's block tables, since both models keep the same token at the
same slot. Source: Leviathan et al. 2023; Chen et al. 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.draft.context_blocks import ContextBlocks
from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.proposal import DenseProbs, DraftProposal
from foredraft.draft.trees import comb, padded_tree
from foredraft.kv.cache import KVCache
from foredraft.models.batch import ragged_batch
from foredraft.models.decoder import TargetModel
from foredraft.sampling.choose import draw_drafts
from foredraft.sampling.transform import process_drafts


@dataclass
class _Written:
    """What the draft model's cache holds of a request: `length` committed tokens, then its own `draft`."""

    length: int
    draft: list[int]

    def valid(self, token_ids: Sequence[int]) -> int:
        """Tokens of `token_ids` whose KV is right: the committed ones, and drafts that came true."""
        count = self.length
        for drafted in self.draft:
            if count >= len(token_ids) or token_ids[count] != drafted:
                break
            count += 1
        return min(count, len(token_ids) - 1)


class DraftModelDrafter:
    """Drafts with `model`, which shares the target's tokenizer.

    Args:
        model: the draft model.
        cache: its KV cache, with as many blocks of the same size as the target's.
        vocab_size: the target's; a draft model padded to another size has the same ids below.
        tree_width: tokens drawn at each position; above 1 the draft is a comb: the path of first draws, and their
            siblings, which cost no further forward.
    """

    method = "draft_model"
    corrector: str | None = None
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: TargetModel, cache: KVCache, vocab_size: int, tree_width: int = 1) -> None:
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size
        self._width = tree_width
        self._written: dict[str, _Written] = {}
        self._blocks = ContextBlocks(cache.block_size)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        depths = [self._depth(request) for request in requests]
        drafts: list[list[int]] = [[] for _ in requests]  # nodes, level by level; a level's first is on the path
        spines: list[list[int]] = [[] for _ in requests]
        probs = self._empty_probs(requests, max(depths))
        active = [index for index, depth in enumerate(depths) if depth > 0]
        pending = {index: self._caught_up(requests[index]) for index in active}
        starts = {index: start for index, (start, _) in pending.items()}
        for offset in range(max(depths)):
            active = [index for index in active if depths[index] > offset]
            logits = self._forward([requests[index] for index in active], [pending[index] for index in active])
            states = [requests[index].state for index in active]
            processed = process_drafts(logits, states, [spines[index] for index in active])
            drawn = draw_drafts(processed, states, offset, width=self._width, with_probs=probs is not None)
            if probs is not None:
                assert drawn.probs is not None
                level = slice(offset * self._width, (offset + 1) * self._width)
                probs[torch.tensor(active, device=probs.device), level] = drawn.probs[:, None]
            for index, tokens in zip(active, drawn.token_ids.tolist(), strict=True):
                start, ids = pending[index]
                pending[index] = (start + len(ids), tokens[:1])
                drafts[index] += tokens
                spines[index] += tokens[:1]
        for index, depth in enumerate(depths):
            if depth:
                request, length = requests[index], len(requests[index].token_ids)
                self._written[request.request_id] = _Written(length, spines[index][:-1])
                # The last draft is drawn, not fed.
                stop = length + depth - 1
                self._blocks.wrote(request.block_table, request.block_hashes, starts[index], length, stop)
        return self._proposal(drafts, depths, probs)

    def _proposal(self, drafts: list[list[int]], depths: list[int], probs: Tensor | None) -> DraftProposal:
        device = self._model.device
        proposal = DraftProposal.deterministic(drafts, device)
        tree = padded_tree([comb(depth, self._width) for depth in depths], device) if self._width > 1 else None
        chosen = proposal.probs if probs is None else DenseProbs(probs)
        return DraftProposal(proposal.token_ids, proposal.lengths, chosen, tree=tree)

    def _depth(self, request: DraftRequest) -> int:
        """Draft positions that are wanted, as far as the draft model's own context reaches."""
        room = self._model.config.max_model_len - len(request.token_ids)
        return max(0, min(request.max_draft_tokens // self._width, room))

    def _empty_probs(self, requests: Sequence[DraftRequest], depth: int) -> Tensor | None:
        """Room for q [B, nodes, V], or None when no request's verification looks at it."""
        if all(request.state.matches_target for request in requests):
            return None
        shape = (len(requests), depth * self._width, self._vocab_size)
        return torch.zeros(shape, dtype=torch.float32, device=self._model.device)

    def _caught_up(self, request: DraftRequest) -> tuple[int, list[int]]:
        """The first position that the draft model has not seen, and the tokens from there to the anchor."""
        tokens = request.token_ids
        written = self._written.get(request.request_id)
        if written is None:
            reused = self._blocks.num_blocks(request.block_table, request.block_hashes) * self._cache.block_size
            written = _Written(reused, [])
        start = written.valid(tokens)
        return start, list(tokens[start:])

    def _forward(self, requests: Sequence[DraftRequest], pending: Sequence[tuple[int, list[int]]]) -> Tensor:
        """Logits [B, V] after each request's pending tokens."""
        starts = [start for start, _ in pending]
        tokens = [ids for _, ids in pending]
        tables = [request.block_table for request in requests]
        batch = ragged_batch(
            tokens,
            starts,
            tables,
            [1] * len(tokens),
            block_size=self._cache.block_size,
            device=self._model.device,
        )
        return self._fitted(self._model.forward(batch, self._cache).logits)

    def _fitted(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary: checkpoints of one tokenizer can be padded to different sizes."""
        surplus = logits.shape[-1] - self._vocab_size
        if surplus > 0:
            return logits[:, : self._vocab_size]
        return F.pad(logits, (0, -surplus), value=float("-inf")) if surplus < 0 else logits

    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        pass

    def release(self, request_id: str) -> None:
        self._written.pop(request_id, None)

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        """All: what it has not written there it catches up on when it drafts."""
        return len(block_hashes)
