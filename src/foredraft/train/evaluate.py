"""What a drafter reaches on texts and prompts that it was not trained on, and the calibration of its confidence.

Teacher-forced figures come from the feature files: each slot is judged given the true tokens before it. Self-fed ones,
and τ, come from the engine, where a slot sees the drafter's own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from foredraft.config import SpeculativeConfig
from foredraft.draft.block_model import load_block_model
from foredraft.draft.correctors.confidence import calibrate, calibration_error
from foredraft.engine.llm import LLM
from foredraft.measure.prompts import encoded
from foredraft.sampling.params import SamplingParams
from foredraft.train.batches import TrainingBatch, batches
from foredraft.train.objective import Slots, corrected_scores, score_base
from foredraft.train.trainer import Network

RECALL_AT = (1, 4, 8, 16)
EVALUATION_ANCHORS = 24


@dataclass(frozen=True)
class SlotFigures:
    """Teacher-forced figures by slot, slot 0 first.

    Args:
        alpha_base, alpha: acceptance probability of the backbone alone and after correction.
        recall: of each K, how often the text's own token is among the backbone's K best.
        expected_length: tokens per step that these α would give: 1 + Σ_k Π_{j≤k} α_j.
        expected_length_base: the same of the backbone alone.
        calibration_error: of the predicted running product, mean over slots; None without a confidence head.
        num_slots: slots that were judged.
    """

    alpha_base: list[float]
    alpha: list[float]
    recall: dict[int, list[float]]
    expected_length: float
    expected_length_base: float
    calibration_error: float | None
    num_slots: int


@torch.no_grad()
def slot_figures(network: Network, files: Sequence[Path]) -> SlotFigures:
    """Judges every slot of some random anchors of all texts, after calibrating nothing."""
    base, corrected, valid = [], [], []
    found: dict[int, list[Tensor]] = {count: [] for count in RECALL_AT}
    logits: list[Tensor] = []
    head = network.model.corrector.confidence_head
    for batch in _evaluation_batches(network, files):
        slots = network.slots(batch)
        base.append(score_base(slots).alpha)
        scored, scores = corrected_scores(network.model, slots, network.head, inject=False)
        corrected.append(scored.alpha)
        valid.append(scored.valid)
        hits = network.columns.ids(slots.head.top_columns) == slots.flat("labels")[..., None]
        for count in RECALL_AT:
            found[count].append(hits[..., :count].any(-1))
        if head is not None:
            logits.append(_confidence_logits(network, slots, scores))
    real = torch.cat(valid)
    alpha, alpha_base = torch.cat(corrected), torch.cat(base)
    error = None
    if head is not None:
        whole = real.all(-1)
        predicted = head.calibrated(torch.cat(logits))[whole].cumprod(-1)
        truth = alpha[whole].cumprod(-1)
        errors = [calibration_error(predicted[:, slot], truth[:, slot]) for slot in range(truth.shape[1])]
        error = sum(errors) / len(errors)
    return SlotFigures(
        alpha_base=_means(alpha_base, real),
        alpha=_means(alpha, real),
        recall={count: _means(torch.cat(each), real) for count, each in found.items()},
        expected_length=_expected(alpha, real),
        expected_length_base=_expected(alpha_base, real),
        calibration_error=error,
        num_slots=int(real.sum()),
    )


@torch.no_grad()
def calibrate_confidence(network: Network, files: Sequence[Path]) -> None:
    """Sets the confidence head's temperatures from texts that were not trained on, left to right."""
    head = network.model.corrector.confidence_head
    if head is None:
        return
    network.model.eval()
    logits, alpha = [], []
    for batch in _evaluation_batches(network, files):
        slots = network.slots(batch)
        scored, scores = corrected_scores(network.model, slots, network.head, inject=False)
        whole = scored.valid.all(-1)
        logits.append(_confidence_logits(network, slots, scores)[whole])
        alpha.append(scored.alpha[whole])
    head.temperatures.copy_(calibrate(torch.cat(logits), torch.cat(alpha)))


@dataclass(frozen=True)
class EngineFigures:
    """What the engine measured on held-out prompts.

    Args:
        temperature: of the target.
        mean_acceptance_length: τ over all steps.
        acceptance_rate_per_position: self-fed acceptance, position 0 first.
        num_steps: target forwards of requests.
    """

    temperature: float
    mean_acceptance_length: float
    acceptance_rate_per_position: list[float]
    num_steps: int


def engine_figures(
    target: str,
    drafter: Path,
    prompts: Sequence[str],
    *,
    temperature: float,
    max_tokens: int,
    tree: bool,
    **options: object,
) -> EngineFigures:
    """Runs the drafter in the engine: chains of its whole block, or trees of twice as many nodes."""
    slots = load_block_model(drafter).config.num_draft_tokens
    speculative = SpeculativeConfig(
        method="block",
        model=str(drafter),
        num_speculative_tokens=2 * slots if tree else slots,
        tree_width=2 if tree else 1,
        adaptive=False,  # what the drafter can do, not when it pays
    )
    llm = LLM(target, speculative=speculative, **options)  # type: ignore[arg-type]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    llm.generate([encoded(llm, prompt) for prompt in prompts], params)
    stats = llm.stats
    return EngineFigures(
        temperature, stats.mean_acceptance_length, list(stats.acceptance_rate_per_position), stats.num_steps
    )


def _evaluation_batches(network: Network, files: Sequence[Path]) -> list[TrainingBatch]:
    slots = network.model.config.num_draft_tokens
    found = batches(files, texts=4, anchors=EVALUATION_ANCHORS, num_slots=slots, seed=1, epoch=0)
    return [batch.to(network.device) for batch in found]


def _confidence_logits(network: Network, slots: Slots, scores: Tensor) -> Tensor:
    head = network.model.corrector.confidence_head
    assert head is not None
    predecessor = network.model.corrector.predecessor(slots.flat("previous"))
    logits: Tensor = head(slots.hidden, predecessor, scores)
    return logits


def _means(values: Tensor, valid: Tensor) -> list[float]:
    return ((values * valid).sum(0) / valid.sum(0).clamp(min=1)).tolist()


def _expected(alpha: Tensor, valid: Tensor) -> float:
    whole = alpha[valid.all(-1)]
    return 1 + float(whole.cumprod(-1).sum(-1).mean())
