"""Faults put into an engine on purpose, so that an audit can show that it would see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.draft.drafter import Drafter, DraftRequest, Observation
from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.engine.step import Engine
from foredraft.engine.verifying import RATIO_RULES, RatioRule
from foredraft.kv.cache import KVCache
from foredraft.models.batch import ForwardBatch
from foredraft.models.decoder import ForwardOutput, TargetModel
from foredraft.verify.ratio import draft_probs_at_tokens
from foredraft.verify.verification import Verification


class Softened:
    """A model whose logits are drawn towards each other: a draft model whose q is near its target's p, but not p.

    The factor matters: at 0.6, what the leaking cut gives to the probable tokens is by chance what the rejections take
    from them, and the fault hardly changes the distribution.
    """

    def __init__(self, model: TargetModel, factor: float = 0.7) -> None:
        self._model = model
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, batch: ForwardBatch, cache: KVCache, feature_layers: Sequence[int] = ()) -> ForwardOutput:
        output = self._model.forward(batch, cache, feature_layers)
        return replace(output, logits=output.logits * self._factor)


class Misreporting:
    """A drafter whose proposals are changed after they were made."""

    def __init__(self, inner: Drafter, change: Callable[[DraftProposal], DraftProposal]) -> None:
        self._inner = inner
        self._change = change
        self.method = inner.method
        self.corrector = inner.corrector
        self.feature_layers = inner.feature_layers

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        return self._change(self._inner.propose(requests))

    def observe(self, observations: Sequence[Observation], features: Sequence[Tensor]) -> None:
        self._inner.observe(observations, features)

    def release(self, request_id: str) -> None:
        self._inner.release(request_id)

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        return self._inner.num_reusable(block_table, block_hashes)


def understated_q(proposal: DraftProposal) -> DraftProposal:
    """Reports half of each draft token's probability, so that tokens are accepted too often."""
    if isinstance(proposal.probs, DenseProbs):
        return replace(proposal, probs=DenseProbs(proposal.probs.probs / 2))
    return replace(proposal, probs=SparseProbs(proposal.probs.candidates, proposal.probs.probs / 2))


def leaking_cut(proposal: DraftProposal) -> DraftProposal:
    """Ends a draft before the first token less probable than its drafter's draws are on average: a cut by the value of
    the very token that is cut."""
    average = proposal.probs.probs.double().square().sum(-1)  # [B, γ]
    improbable = draft_probs_at_tokens(proposal) < average
    kept = (improbable.int().cumsum(-1) == 0).sum(-1)
    return replace(proposal, lengths=torch.minimum(proposal.lengths, kept))


def without_residual(rule: RatioRule) -> RatioRule:
    """A rule that draws a rejected position from p again, not from what q left of it."""

    def broken(proposal: DraftProposal, target_probs: Tensor, accept: Tensor, final: Tensor) -> Verification:
        right = rule(proposal, target_probs, accept, final)
        accepted = replace(proposal, lengths=right.num_accepted)
        return rule(accepted, target_probs, torch.zeros_like(accept), final)

    return broken


def _break_residual(engine: Engine) -> None:
    engine.rules = {name: without_residual(rule) for name, rule in RATIO_RULES.items()}


def _break_q(engine: Engine) -> None:
    assert engine.drafter is not None
    engine.drafter = Misreporting(engine.drafter, understated_q)


def _break_cut(engine: Engine) -> None:
    assert engine.drafter is not None
    engine.drafter = Misreporting(engine.drafter, leaking_cut)


FAULTS: dict[str, Callable[[Engine], None]] = {
    "wrong residual": _break_residual,
    "lying q": _break_q,
    "leaking cut": _break_cut,
}


def softened_self_draft(engine: Engine) -> Drafter:
    """A random drafter for any target: the target itself, softened."""
    pool, model = engine.scheduler.pool, engine.model
    cache = model.new_cache(pool.num_blocks, pool.block_size)
    return DraftModelDrafter(cast(TargetModel, Softened(model)), cache, model.config.vocab_size)
