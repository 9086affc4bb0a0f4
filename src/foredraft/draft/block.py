"""Drafts a whole block of tokens in one pass over the target's own features, and corrects it from slot to
slot.

The features come from the target's verification forward, so that drafting costs no target pass. What is observed waits
until the request drafts again, until there is much of it, or until the request ends: a stretch without drafting costs
the drafter next to nothing, and full blocks are there for other requests that reuse them. The features of a reused
block are never seen again, so a request may only reuse blocks whose context was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foredraft.draft.backbone_config import check_target
from foredraft.draft.backbone_runner import BackboneRunner
from foredraft.draft.block_model import BlockModel
from foredraft.draft.context_blocks import ContextBlocks
from foredraft.draft.correctors import FirstOrder, SlotSampler
from foredraft.draft.correctors.candidates import Candidates, top_candidates
from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.lattice import Chain, best_tree, normalised
from foredraft.draft.proposal import DenseProbs, DraftProposal, DraftTree, SparseProbs
from foredraft.errors import DrafterError
from foredraft.kv.cache import KVCache
from foredraft.models.config import ModelConfig
from foredraft.models.linear import Linear, pack_linear

WAITING_BLOCKS = 4
"""Blocks of decoded text after which its context is written though nothing drafts: few calls for many rows. A prompt's
is written at once, since others may share it."""

VIEWS = 16
"""Rows for each request of a forward up to which their features are kept as views of all of them."""

TREE_CANDIDATES = 16
"""Candidates of a slot in a tree's lattice, for correctors that score the whole vocabulary."""


class EmbeddingAndHead(Protocol):
    """What a block drafter borrows from its target: `Decoder` has it."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    head: Linear

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass
class _Context:
    """A request's context: positions below `written` are in the cache, the features [n, m·d] of the `num_pending`
    after them wait, as `newest` was the last to tell, and `last` [d] is the newest row that was written, kept for a
    backbone with a carry only."""

    written: int = 0
    num_pending: int = 0
    pending: list[Tensor] = field(default_factory=list)
    newest: Observation | None = None
    last: Tensor | None = None

    @property
    def length(self) -> int:
        return self.written + self.num_pending

    def append(self, start: int, features: Tensor) -> None:
        """Takes the features of the positions from `start` on. A gap can never be filled, so what follows one is
        dropped, and the request does not draft; positions that are known already are replaced."""
        if start > self.length:
            return
        kept = start - self.written
        if kept < 0:
            self.written, self.last, kept = start, None, 0
        if kept < self.num_pending:
            self.pending = [torch.cat(self.pending)[:kept]]
        self.pending.append(features)
        self.num_pending = kept + len(features)


class BlockDrafter:
    """Drafts with a block-parallel backbone and a causal corrector.

    Args:
        model: the drafter's weights.
        target: whose embedding and head it uses.
        num_blocks, block_size: of the target's cache, whose block tables it shares.
        tree: draft the best tree of `max_draft_tokens` nodes in place of a chain.

    Raises:
        DrafterError: the drafter was made for another target, or a tree is asked of a corrector that has
            none.
    """

    method = "block"

    def __init__(
        self,
        model: BlockModel,
        target: EmbeddingAndHead,
        num_blocks: int,
        block_size: int,
        *,
        tree: bool = False,
    ) -> None:
        check_target(model.config, target.config, f"drafter with corrector {model.config.corrector}")
        if tree and not isinstance(model.corrector, FirstOrder):
            raise DrafterError(
                f"corrector {model.config.corrector}: its scores depend on the whole draft, so it makes no "
                "trees; use a chain (tree_width 1), or a drafter with another corrector"
            )
        self.config = model.config
        self.corrector: str | None = model.config.corrector
        self.feature_layers: tuple[int, ...] = model.config.target_layers
        self._target = target
        self._tree = tree
        self._corrector = model.corrector.to(target.device).eval().requires_grad_(False)
        self._corrector.bind(target.embed)
        self._corrector.freeze(target.dtype)
        self._runner = BackboneRunner(
            model.backbone,
            dtype=target.dtype,
            device=target.device,
            max_model_len=target.config.max_model_len,
        )
        self._cache: KVCache = self._runner.new_cache(num_blocks, block_size)
        self._contexts: dict[str, _Context] = {}
        self._blocks = ContextBlocks(block_size)
        self._draft_ids, self._head = None, None
        if model.draft_ids is not None:
            self._draft_ids = model.draft_ids.to(target.device)
            rows = target.head.rows(self._draft_ids)
            self._head = pack_linear(rows, None, dtype=target.dtype, device=target.device)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the context cache."""
        return self._runner.kv_bytes_per_token

    @torch.inference_mode()
    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        wanted = [row for each in observations for row in each.rows]
        rows = torch.cat(list(features), -1)
        if len(wanted) != len(rows):
            rows = rows[torch.tensor(wanted, dtype=torch.int64, device=rows.device)]
        counts = [len(each.rows) for each in observations]
        size = self._cache.block_size
        filled: list[Observation] = []
        for observation, part in zip(observations, torch.split(rows, counts), strict=True):
            context = self._context(observation)
            is_prompt = len(part) >= size
            if not is_prompt and len(rows) > VIEWS * len(counts):
                part = part.clone()  # it waits, and a view would keep another request's whole prompt
            context.append(observation.start, part)
            context.newest = observation
            if context.num_pending >= (size if is_prompt else WAITING_BLOCKS * size):
                filled.append(observation)
        self._catch_up(filled)

    @torch.inference_mode()
    def release(self, request_id: str) -> None:
        context = self._contexts.get(request_id)
        if context is not None and context.newest is not None:
            num_full = context.length // self._cache.block_size
            held = min(len(context.newest.block_table), len(context.newest.block_hashes))
            if context.written // self._cache.block_size < num_full <= held:
                self._catch_up([context.newest])
        self._contexts.pop(request_id, None)

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        return self._blocks.num_blocks(block_table, block_hashes)

    def _context(self, request: DraftRequest | Observation) -> _Context:
        """What is known of a request; of a new one, what the blocks that it reuses hold."""
        context = self._contexts.get(request.request_id)
        if context is None:
            reused = self._blocks.num_blocks(request.block_table, request.block_hashes)
            context = self._contexts[request.request_id] = _Context(reused * self._cache.block_size)
        return context

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        counts = [self._num_drafts(request) for request in requests]
        active = [index for index, count in enumerate(counts) if count > 0]
        if not active:
            return DraftProposal.deterministic([[] for _ in requests], self._target.device)
        drafting = [requests[index] for index in active]
        depths = [counts[index] for index in active]
        self._catch_up(drafting)
        for request, depth in zip(drafting, depths, strict=True):
            anchor = len(request.token_ids) - 1
            self._blocks.wrote(request.block_table, request.block_hashes, anchor, anchor, anchor + 1 + depth)
        hidden, logits = self._block(drafting, depths)
        if self._tree:
            proposal = self._best_trees(drafting, depths, hidden, logits)
        else:
            proposal = self._chains(drafting, depths, hidden, logits)
        return proposal if len(active) == len(requests) else _spread(proposal, active, len(requests))

    def _num_drafts(self, request: DraftRequest) -> int:
        """Slots to draft: none unless the features of everything before the anchor were seen."""
        context = self._context(request)
        if context.length == 0 or context.length != len(request.token_ids) - 1:
            return 0
        if self.config.carry and context.last is None and not context.num_pending:  # reused, and rows are in no cache
            return 0
        room = self._target.config.max_model_len - len(request.token_ids)
        return max(0, min(request.max_draft_tokens, self.config.num_draft_tokens, room))

    def _catch_up(self, requests: Sequence[DraftRequest | Observation]) -> None:
        """Writes the context of each request that was observed and not written."""
        features: list[Tensor] = []
        positions: list[int] = []
        ends: list[int] = []
        slots: list[int] = []
        size = self._cache.block_size
        for request in requests:
            context = self._contexts[request.request_id]
            span = range(context.written, context.length)
            self._blocks.wrote(request.block_table, request.block_hashes, span.start, span.stop, span.stop)
            features += context.pending
            positions += span
            ends.append(len(positions))
            slots += [request.block_table[at // size] * size + at % size for at in span]
            context.written, context.num_pending, context.pending = span.stop, 0, []
        if not positions:
            return
        device = self._target.device
        rows = self._runner.context(torch.cat(features))
        self._runner.write_context(
            rows, torch.tensor(positions, device=device), torch.tensor(slots, device=device), self._cache
        )
        if self.config.carry:
            for request, begin, end in zip(requests, [0, *ends], ends, strict=False):
                if end > begin:
                    self._contexts[request.request_id].last = rows[end - 1].clone()

    def _block(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Hidden states [B, γ, d] and unary logits [B, γ, C] of the slots; past a request's depth its last
        one again."""
        batch = self._runner.block_batch(
            [request.token_ids[-1] for request in requests],
            [len(request.token_ids) - 1 for request in requests],
            [request.block_table for request in requests],
            depths,
            self._cache.block_size,
        )
        last = [self._contexts[request.request_id].last for request in requests] if self.config.carry else []
        carried = torch.stack([row for row in last if row is not None]) if last else None
        hidden = self._runner.forward(self._target.embed(batch.input_ids), batch, self._cache, carried)
        logits = self._target.logits(hidden) if self._head is None else self._head(hidden).float()
        deepest = max(depths)
        if len(hidden) == len(depths) * deepest:
            shape = (len(depths), deepest, -1)
            return hidden.float().reshape(shape), logits.reshape(shape)
        rows, start = [], 0
        for depth in depths:
            rows += [start + min(slot, depth - 1) for slot in range(deepest)]
            start += depth
        index = torch.tensor(rows, device=hidden.device).reshape(len(depths), deepest)
        return hidden[index].float(), logits[index]

    def _candidates(self, requests: Sequence[DraftRequest], logits: Tensor, count: int) -> Candidates:
        """Each slot's most probable tokens, as far as the request's fixed biases allow them."""
        biases = [request.state.bias for request in requests]
        preference = None
        if any(bias is not None for bias in biases):
            preference = logits.clone()
            for row, bias in zip(preference, biases, strict=True):
                if bias is not None:
                    own = bias if self._draft_ids is None else bias[self._draft_ids.to(bias.device)]
                    row += own.to(row.device)
        return top_candidates(logits, count, self._draft_ids, preference)

    def _anchors(self, requests: Sequence[DraftRequest]) -> Tensor:
        return torch.tensor([request.token_ids[-1] for request in requests], device=self._target.device)

    def _chains(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], hidden: Tensor, logits: Tensor
    ) -> DraftProposal:
        """Chains drawn slot by slot."""
        sampler = SlotSampler([request.state for request in requests])
        anchors, count = self._anchors(requests), self._corrector.num_candidates
        if count is None:
            drafts = self._corrector.correct(logits, hidden, anchors, sampler)
        else:
            top = self._candidates(requests, logits, count)
            drafts = self._corrector.correct(top.scores, hidden, anchors, sampler, top.token_ids)
        lengths = torch.tensor(depths, device=logits.device)
        return DraftProposal(drafts.token_ids, lengths, drafts.probs, drafts.confidence)

    def _best_trees(
        self, requests: Sequence[DraftRequest], depths: Sequence[int], hidden: Tensor, logits: Tensor
    ) -> DraftProposal:
        """The trees with the most expected accepted tokens under the drafter. Nothing in them is drawn, so
        each node's distribution is one-hot."""
        assert isinstance(self._corrector, FirstOrder)
        top = self._candidates(requests, logits, self._corrector.num_candidates or TREE_CANDIDATES)
        scores = self._corrector.lattice(top.scores, hidden, self._anchors(requests), top.token_ids)
        chain = self._expected(requests, scores, top.token_ids)
        past = torch.tensor(depths, device=logits.device)[:, None] <= torch.arange(
            1, chain.num_slots, device=logits.device
        )
        chain = Chain(chain.first, chain.edges.masked_fill(past[..., None, None], float("-inf")))
        tree = best_tree(chain, max(request.max_draft_tokens for request in requests))
        wanted = torch.tensor([request.max_draft_tokens for request in requests], device=logits.device)
        batch = torch.arange(len(requests), device=logits.device)[:, None]
        tokens = top.token_ids[batch, tree.depths - 1, tree.columns]
        above = torch.where(tree.parents < 0, 0.0, tree.log_probs.gather(1, tree.parents.clamp(min=0)))
        confidence = (tree.log_probs - above).exp().nan_to_num(0.0).float()
        one_hot = SparseProbs(tokens[..., None], torch.ones_like(tokens[..., None], dtype=torch.float32))
        lengths = torch.minimum(tree.lengths, wanted)
        return DraftProposal(tokens, lengths, one_hot, confidence, DraftTree(tree.parents, tree.depths))

    def _expected(self, requests: Sequence[DraftRequest], scores: Chain, candidates: Tensor) -> Chain:
        """Log-probabilities of what the target is expected to take: at its temperature, and, under the
        coupled rule, with the noise that its choice will have."""
        states = [request.state for request in requests]
        temperatures = [1.0 if state.params.is_greedy else state.params.temperature for state in states]
        scale = torch.tensor(temperatures, device=candidates.device)[:, None]
        first, edges = scores.first / scale, scores.edges / scale[..., None, None]
        coupled = [state.verification == "coupled" and not state.params.is_greedy for state in states]
        if any(coupled):
            sampler = SlotSampler(states)
            noise = sampler.noise_of(candidates) * torch.tensor(coupled, device=scale.device)[:, None, None]
            first, edges = first + noise[:, 0], edges + noise[:, 1:, None]
        return normalised(Chain(first, edges))


def _spread(proposal: DraftProposal, active: Sequence[int], count: int) -> DraftProposal:
    """The proposal of the `active` ones among `count` requests; the others have no draft."""
    index = torch.tensor(active, device=proposal.token_ids.device)

    def over(part: Tensor) -> Tensor:
        whole = part.new_zeros(count, *part.shape[1:])
        whole[index] = part
        return whole

    probs = proposal.probs
    spread: DenseProbs | SparseProbs
    if isinstance(probs, DenseProbs):
        spread = DenseProbs(over(probs.probs))
    else:
        spread = SparseProbs(over(probs.candidates), over(probs.probs))
    tree = proposal.tree
    return DraftProposal(
        over(proposal.token_ids),
        over(proposal.lengths),
        spread,
        None if proposal.confidence is None else over(proposal.confidence),
        None if tree is None else DraftTree(over(tree.parents), over(tree.depths)),
    )
