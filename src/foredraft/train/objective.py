"""One training step's loss: from a batch to the losses of the backbone, the corrector and the confidence head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.config import require_choice
from foredraft.draft.block_model import BlockModel
from foredraft.train.batches import TrainingBatch
from foredraft.train.head import HeadScores
from foredraft.train.losses import LOSSES, acceptance, dpace_weights, expected_accepted, exponential_weights

NEVER = float("-inf")
WEIGHTS = ("exponential", "dpace")


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Args:
        loss: a key of `LOSSES`.
        weights: of the slots: `exponential` or `dpace`.
        survival: share of −log(expected accepted tokens of the block), beside the loss by slots.
        confidence: share of the confidence head's cross-entropy.
    """

    loss: str = "lk"
    weights: str = "exponential"
    survival: float = 0.0
    confidence: float = 0.1

    def __post_init__(self) -> None:
        require_choice("loss", self.loss, tuple(LOSSES))
        require_choice("weights", self.weights, WEIGHTS)


class Columns:
    """Token ids to columns of the draft vocabulary."""

    def __init__(self, draft_ids: Tensor | None, vocab_size: int, device: torch.device) -> None:
        self._column_of: Tensor | None = None
        self._draft_ids = None if draft_ids is None else draft_ids.to(device)
        if draft_ids is not None:
            self._column_of = torch.full((vocab_size,), -1, dtype=torch.int64, device=device)
            self._column_of[draft_ids.to(device)] = torch.arange(len(draft_ids), device=device)

    def of(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of ids, 0 for what is not in it, and which ones are."""
        if self._column_of is None:
            return token_ids, torch.ones_like(token_ids, dtype=torch.bool)
        columns = self._column_of[token_ids]
        return columns.clamp(min=0), columns >= 0

    def ids(self, columns: Tensor) -> Tensor:
        """Token ids of columns."""
        return columns if self._draft_ids is None else self._draft_ids[columns]


@dataclass(frozen=True)
class Slots:
    """A batch's slots as the networks see them, blocks flattened to N = B·A.

    Args:
        hidden: [N, γ, d].
        head: what is known of the unary logits, each field [N, γ, …]: at the 64 top tokens, then at the label, and
            each slot's best columns.
        columns: of the draft vocabulary.
        batch: where they came from.
    """

    hidden: Tensor
    head: HeadScores
    columns: Columns
    batch: TrainingBatch

    def flat(self, name: str) -> Tensor:
        """A field [B, A, γ, …] of the batch as [N, γ, …]."""
        field: Tensor = getattr(self.batch, name)
        return field.flatten(0, 1)


@dataclass(frozen=True)
class Scored:
    """Draft log-probabilities where they matter.

    Args:
        p, log_q: [N, γ, M], the target's probabilities and the draft's of the same tokens.
        log_q_true, p_true: [N, γ], of the text's own tokens; −inf where q cannot propose them.
        valid: [N, γ].
    """

    p: Tensor
    log_q: Tensor
    log_q_true: Tensor
    p_true: Tensor
    valid: Tensor

    @property
    def alpha(self) -> Tensor:
        """Probability [N, γ] that each slot's draft is accepted given the true tokens before it."""
        return acceptance(self.p, self.log_q)


def score_base(slots: Slots) -> Scored:
    """The backbone's own log-probabilities."""
    _, inside = slots.columns.of(slots.flat("top_ids"))
    _, true_inside = slots.columns.of(slots.flat("labels"))
    log_q = slots.head.at - slots.head.totals[..., None]
    return Scored(
        p=slots.flat("top_probs"),
        log_q=log_q[..., :-1].masked_fill(~inside, NEVER),
        log_q_true=log_q[..., -1].masked_fill(~true_inside, NEVER),
        p_true=_p_true(slots),
        valid=slots.flat("valid"),
    )


def score_vocabulary(logits: Tensor, slots: Slots) -> Scored:
    """Log-probabilities over the whole draft vocabulary from logits [N, γ, C]."""
    logits = logits.float()
    total = logits.logsumexp(-1, keepdim=True)
    at, inside = slots.columns.of(slots.flat("top_ids"))
    log_q = (logits.gather(-1, at) - total).masked_fill(~inside, NEVER)
    true_at, true_inside = slots.columns.of(slots.flat("labels"))
    log_q_true = (logits.gather(-1, true_at[..., None]) - total)[..., 0].masked_fill(~true_inside, NEVER)
    return Scored(slots.flat("top_probs"), log_q, log_q_true, _p_true(slots), slots.flat("valid"))


def score_candidates(model: BlockModel, slots: Slots, *, inject: bool) -> tuple[Scored, Tensor]:
    """Log-probabilities over each slot's candidates after correction; and the corrected scores [N, γ, K].

    Args:
        inject: put the text's own token in place of the last candidate where it is missing: the choice among
            candidates can be learned at every slot then. For training only; measuring leaves them as they are.
    """
    count = model.corrector.num_candidates
    ids, scores = slots.columns.ids(slots.head.top_columns[..., :count]), slots.head.top[..., :count]
    labels = slots.flat("labels")
    if inject:
        _, inside = slots.columns.of(labels)
        missing = inside & ~(ids == labels[..., None]).any(-1)
        ids = torch.cat([ids[..., :-1], torch.where(missing, labels, ids[..., -1])[..., None]], -1)
        true_score = torch.where(missing, slots.head.at[..., -1], scores[..., -1])
        scores = torch.cat([scores[..., :-1], true_score[..., None]], -1)
    corrected = model.corrector.teacher_forced(scores, slots.hidden, slots.flat("previous"), ids).float()
    log_q = corrected.log_softmax(-1)
    same = ids[..., :, None] == slots.flat("top_ids")[..., None, :]  # [N, γ, K, 64]
    p = (same * slots.flat("top_probs")[..., None, :]).sum(-1)
    log_q_true = torch.where(ids == labels[..., None], log_q, NEVER).amax(-1)
    return Scored(p, log_q, log_q_true, _p_true(slots), slots.flat("valid")), corrected


def corrected_scores(model: BlockModel, slots: Slots, head: Tensor, *, inject: bool) -> tuple[Scored, Tensor]:
    """As the corrector scores: its candidates, or the whole draft vocabulary when it takes no candidates.

    Args:
        head: [C, d], for the latter.
    """
    if model.corrector.num_candidates is not None:
        return score_candidates(model, slots, inject=inject)
    unary = F.linear(slots.hidden.to(head.dtype), head).float()
    scores = model.corrector.teacher_forced(unary, slots.hidden, slots.flat("previous")).float()
    return score_vocabulary(scores, slots), scores


def slot_loss(scored: Scored, objective: Objective) -> Tensor:
    """The weighted mean of the slots' losses, and the survival term where it has a share."""
    valid = scored.valid
    each = LOSSES[objective.loss](scored.p, scored.log_q)
    if objective.weights == "dpace":
        weights = dpace_weights(scored.log_q_true, valid)
    else:
        weights = exponential_weights(valid.shape[-1]).to(each.device).expand_as(each)
    weights = weights * valid
    loss = (each * weights).sum() / weights.sum().clamp(min=1e-8)
    if objective.survival:
        possible = torch.where(scored.log_q_true > NEVER, scored.log_q_true, -20.0)
        length = expected_accepted(scored.p_true, possible, scored.alpha, valid)
        some = valid.any(-1)
        loss = loss - objective.survival * ((length + 1).log() * some).sum() / some.sum().clamp(min=1)
    return loss


def confidence_loss(model: BlockModel, slots: Slots, scores: Tensor, scored: Scored) -> Tensor:
    """Binary cross-entropy of the confidence head against α; nothing but the head learns from it."""
    head = model.corrector.confidence_head
    assert head is not None
    predecessor = model.corrector.predecessor(slots.flat("previous"))
    logits = head(slots.hidden.detach(), None if predecessor is None else predecessor.detach(), scores.detach())
    each = F.binary_cross_entropy_with_logits(logits.float(), scored.alpha.detach().clamp(0, 1), reduction="none")
    return (each * scored.valid).sum() / scored.valid.sum().clamp(min=1)


def _p_true(slots: Slots) -> Tensor:
    same = slots.flat("top_ids") == slots.flat("labels")[..., None]
    return (same * slots.flat("top_probs")).sum(-1)
