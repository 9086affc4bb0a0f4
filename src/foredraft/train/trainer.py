"""The training loop: stages over the feature files, with a checkpoint every half minute.

A resumed run sees the batches that the killed one would have seen, from the last checkpoint on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from foredraft.draft.block import EmbeddingAndHead
from foredraft.draft.block_model import BlockModel
from foredraft.train.batches import TrainingBatch, batches
from foredraft.train.features import read_texts
from foredraft.train.head import HeadScores, head_scores
from foredraft.train.objective import (
    Columns,
    Objective,
    Scored,
    Slots,
    confidence_loss,
    corrected_scores,
    score_base,
    slot_loss,
)

CHECKPOINT_SECONDS = 30.0
LOG_EVERY = 20
WARM_UP = 0.04
CLIP = 1.0
NUM_TOP = 16
"""Candidates of a slot that the head finds; no corrector takes more."""


@dataclass(frozen=True)
class Stage:
    """A part of training.

    Args:
        epochs: passes over the texts.
        backbone_rate, corrector_rate: peak learning rates; 0 freezes.
        base_share: share of the uncorrected logits' loss at the start and at the end of the stage, moved linearly
            (Domino's base-anchored curriculum). 1 throughout trains the backbone alone.
    """

    name: str
    epochs: int
    backbone_rate: float
    corrector_rate: float
    base_share: tuple[float, float]


@dataclass(frozen=True)
class Settings:
    """How to train.

    Args:
        stages: in order.
        texts, anchors: of a batch.
        seed: of the batches' order.
        autocast: run the networks' products in bfloat16; weights and optimiser stay in float32.
    """

    stages: tuple[Stage, ...]
    objective: Objective = field(default_factory=Objective)
    texts: int = 4
    anchors: int = 64
    seed: int = 0
    autocast: bool = True
    weight_decay: float = 0.01


@dataclass(frozen=True)
class TrainingProgress:
    """Where training is: `done` of `total` batches of `stage`; running means of the loss and of α by slot."""

    stage: str
    done: int
    total: int
    slots_per_second: float
    loss: float
    alpha: list[float]


Report = Callable[[TrainingProgress], None]


class Network:
    """A drafter in training on a target's frozen embedding and head.

    Args:
        model: trained in place; its corrector must be bound to the target's embeddings.
        target: whose embedding and head are used.
    """

    def __init__(self, model: BlockModel, target: EmbeddingAndHead, *, autocast: bool = True) -> None:
        device = target.device
        self.model = model.to(device)
        self.device = device
        self._target = target
        self._autocast = autocast
        ids = torch.arange(model.config.vocab_size) if model.draft_ids is None else model.draft_ids
        with torch.no_grad():
            self.head = target.head.rows(ids.to(device)).float()  # [C, d]
            if autocast:
                self.head = self.head.bfloat16()
            mask_id = model.config.mask_token_id
            self._mask = None
            if mask_id is not None:
                self._mask = target.embed(torch.tensor([mask_id], device=device))[0].float().clone()
        self.head = self.head.clone()
        self.columns = Columns(model.draft_ids, model.config.vocab_size, device)

    def slots(self, batch: TrainingBatch, *, with_candidates: bool = True) -> Slots:
        """Runs the backbone over a batch; `with_candidates` also finds each slot's best columns."""
        anchor_ids = batch.previous[..., 0]
        with torch.no_grad():
            embeddings = self._target.embed(anchor_ids.flatten()).float().reshape(*anchor_ids.shape, -1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            hidden = self.model.backbone(batch.features, batch.anchors, embeddings, self._mask)
        hidden = hidden.flatten(0, 1).float()  # [N, γ, d]
        wanted = torch.cat([batch.top_ids, batch.labels[..., None]], -1).flatten(0, 2)
        found = head_scores(hidden.flatten(0, 1), self.head, self.columns.of(wanted)[0], NUM_TOP * with_candidates)
        shaped = {name: value.reshape(*hidden.shape[:2], *value.shape[1:]) for name, value in vars(found).items()}
        return Slots(hidden, HeadScores(**shaped), self.columns, batch)

    def losses(self, batch: TrainingBatch, objective: Objective, base_share: float) -> tuple[Tensor, Scored]:
        """The loss of a batch, and the scores that count: the corrected ones unless the base's share is 1."""
        slots = self.slots(batch, with_candidates=base_share < 1)
        loss = torch.zeros((), device=self.device)
        scored = None
        if base_share > 0:
            scored = score_base(slots)
            loss = loss + base_share * slot_loss(scored, objective)
        if base_share < 1:
            scored, scores = corrected_scores(self.model, slots, self.head, inject=True)
            loss = loss + (1 - base_share) * slot_loss(scored, objective)
            if self.model.corrector.confidence_head is not None:
                loss = loss + objective.confidence * confidence_loss(self.model, slots, scores, scored)
        assert scored is not None
        return loss, scored


class Trainer:
    """Runs the stages over the files, from where the checkpoint in `directory` stopped.

    Args:
        directory: for `checkpoint.pt` and `metrics.jsonl`.
    """

    def __init__(self, network: Network, files: Sequence[Path], settings: Settings, directory: Path) -> None:
        self._network, self._files, self._settings = network, list(files), settings
        self._checkpoint = directory / "checkpoint.pt"
        self._metrics = directory / "metrics.jsonl"
        self._stage = self._epoch = self._batch = self._step = 0
        self._optimizer_state: Mapping[str, Any] | None = None
        self._seconds = 0.0
        if self._checkpoint.exists():
            self._load()

    def run(self, report: Report | None = None) -> None:
        """Trains to the end."""
        per_epoch = count_batches(self._files, self._settings.texts)
        while self._stage < len(self._settings.stages):
            stage = self._settings.stages[self._stage]
            if stage.epochs > 0 and self._trains(stage):
                self._run_stage(stage, per_epoch, report)
                _write(self._network.model.state_dict(), self._checkpoint.with_name(after_stage(stage.name)))
            self._stage, self._epoch, self._batch, self._optimizer_state = self._stage + 1, 0, 0, None
            self._save(None)

    def _trains(self, stage: Stage) -> bool:
        return any(len(group["params"]) > 0 for group in self._groups(stage))

    def _groups(self, stage: Stage) -> list[dict[str, Any]]:
        model = self._network.model
        parts = ((model.backbone, stage.backbone_rate), (model.corrector, stage.corrector_rate))
        groups = []
        for module, rate in parts:
            module.requires_grad_(rate > 0)
            matrices = [each for each in module.parameters() if each.dim() > 1 and rate > 0]
            others = [each for each in module.parameters() if each.dim() <= 1 and rate > 0]
            groups.append({"params": matrices, "lr": rate, "peak": rate, "weight_decay": self._settings.weight_decay})
            groups.append({"params": others, "lr": rate, "peak": rate, "weight_decay": 0.0})
        return [group for group in groups if group["params"]]

    def _run_stage(self, stage: Stage, per_epoch: int, report: Report | None) -> None:
        settings, network = self._settings, self._network
        network.model.train()
        optimizer = torch.optim.AdamW(self._groups(stage), betas=(0.9, 0.95), fused=True)
        if self._optimizer_state is not None:
            optimizer.load_state_dict(dict(self._optimizer_state))
        total, done = per_epoch * stage.epochs, self._epoch * per_epoch + self._batch
        saved = logged = perf_counter()
        sums = _Sums()
        while self._epoch < stage.epochs:
            for batch in self._batches():
                share = done / max(total, 1)
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * schedule(share)
                first, last = stage.base_share
                loss, scored = network.losses(
                    batch.to(network.device), settings.objective, first + (last - first) * share
                )
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                parameters = [each for group in optimizer.param_groups for each in group["params"]]
                nn.utils.clip_grad_norm_(parameters, CLIP)
                optimizer.step()
                sums.add(float(loss.detach()), scored)
                done, self._batch, self._step = done + 1, self._batch + 1, self._step + 1
                if done % LOG_EVERY == 0 or done == total:
                    now = perf_counter()
                    self._seconds += now - logged
                    progress = sums.progress(stage.name, done, total, now - logged)
                    self._log(progress)
                    if report is not None:
                        report(progress)
                    logged, sums = now, _Sums()
                if perf_counter() - saved > CHECKPOINT_SECONDS:
                    self._save(optimizer)
                    saved = perf_counter()
            self._epoch, self._batch = self._epoch + 1, 0

    def _batches(self) -> Iterator[TrainingBatch]:
        settings = self._settings
        found = batches(
            self._files,
            texts=settings.texts,
            anchors=settings.anchors,
            num_slots=self._network.model.config.num_draft_tokens,
            seed=settings.seed,
            epoch=self._stage * 1000 + self._epoch,
        )
        for index, batch in enumerate(found):
            if index >= self._batch:
                yield batch

    def _log(self, progress: TrainingProgress) -> None:
        line = {"step": self._step, "seconds": round(self._seconds, 1), **vars(progress)}
        with self._metrics.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")

    def _save(self, optimizer: torch.optim.Optimizer | None) -> None:
        state = {
            "model": self._network.model.state_dict(),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "place": [self._stage, self._epoch, self._batch, self._step],
            "seconds": self._seconds,
        }
        _write(state, self._checkpoint)

    def _load(self) -> None:
        state = torch.load(self._checkpoint, weights_only=True, map_location=self._network.device)
        self._network.model.load_state_dict(state["model"])
        self._optimizer_state = state["optimizer"]
        self._stage, self._epoch, self._batch, self._step = state["place"]
        self._seconds = state["seconds"]
        if self._metrics.exists():  # what a killed run logged after its checkpoint is logged again
            lines = self._metrics.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= self._step]
            self._metrics.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def after_stage(name: str) -> str:
    """The file with the drafter's weights as a stage left them, for comparisons on one backbone."""
    return f"after-{name}.pt"


def _write(state: Mapping[str, Any], file: Path) -> None:
    partial = file.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, file)


class _Sums:
    """Means over the batches since the last report."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._alpha: Tensor | None = None
        self._valid: Tensor | None = None

    def add(self, loss: float, scored: Scored) -> None:
        alpha = (scored.alpha.detach() * scored.valid).sum(0)
        valid = scored.valid.sum(0)
        self._losses.append(loss)
        self._alpha = alpha if self._alpha is None else self._alpha + alpha
        self._valid = valid if self._valid is None else self._valid + valid

    def progress(self, stage: str, done: int, total: int, seconds: float) -> TrainingProgress:
        assert self._alpha is not None
        assert self._valid is not None
        return TrainingProgress(
            stage,
            done,
            total,
            slots_per_second=round(float(self._valid.sum()) / seconds, 1),
            loss=round(sum(self._losses) / len(self._losses), 5),
            alpha=[round(each, 4) for each in (self._alpha / self._valid.clamp(min=1)).tolist()],
        )


def schedule(share: float) -> float:
    """The learning rate's factor after `share` of a stage: a short rise, then half a cosine down to a hundredth."""
    if share < WARM_UP:
        return share / WARM_UP + 1e-3
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (share - WARM_UP) / (1 - WARM_UP)))


def count_batches(files: Sequence[Path], texts: int) -> int:
    """Batches of an epoch."""
    total = 0
    for file in files:
        found = read_texts(file)
        usable = int((found.starts[1:] - found.starts[:-1] - found.prompt_lengths > 1).sum())
        total += -(-usable // texts)
    return total
