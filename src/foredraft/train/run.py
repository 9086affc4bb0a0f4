"""`foredraft train`, stage by stage; every stage goes on where a killed run stopped.

The output directory is a drafter that the engine loads; `work/` in it holds what training needs and may be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from foredraft.draft.backbone import start_from_target
from foredraft.draft.backbone_config import config_for, spread_layers
from foredraft.draft.block_model import BlockModel, load_block_model, save_block_model
from foredraft.draft.correctors import makes_trees
from foredraft.engine.llm import LLM
from foredraft.models.decoder import Decoder
from foredraft.models.load import open_model_weights
from foredraft.train.evaluate import EngineFigures, SlotFigures, calibrate_confidence, engine_figures, slot_figures
from foredraft.train.features import cache_features, feature_bytes
from foredraft.train.plan import (
    CALIBRATION,
    EVALUATION,
    FEATURES,
    HELD_OUT_EVERY,
    TrainPlan,
    begin,
    check_begun,
    check_held_out,
    check_prompts,
    check_start,
    fitting_target,
)
from foredraft.train.plots import plot_training
from foredraft.train.prompts import TrainingPrompts, is_held_out, training_prompts
from foredraft.train.regenerate import Response, regenerate
from foredraft.train.trainer import Network, Settings, Trainer, TrainingProgress
from foredraft.train.vocabulary import draft_vocabulary

EVALUATION_PROMPTS = 24


@dataclass(frozen=True)
class Progress:
    """What a stage tells: `done` of `total` of its own units, and a line on how it goes."""

    stage: str
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True)
class TrainResult:
    """What came out.

    Args:
        prompts: how many there were to train on and how many were refused.
        answer_tokens: that the target wrote.
        vocabulary_share: the share of the target's probability that the draft vocabulary holds.
        slots: teacher-forced figures on held-out texts.
        engine: figures of the engine on held-out prompts, chains and trees, greedy and at temperature 1.
    """

    prompts: TrainingPrompts
    answer_tokens: int
    vocabulary_share: float
    slots: SlotFigures
    engine: dict[str, EngineFigures]

    def figures(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "num_prompts": len(self.prompts.prompts),
            "num_refused": self.prompts.num_refused,
            "num_repeated": self.prompts.num_repeated,
            "answer_tokens": self.answer_tokens,
            "vocabulary_share": self.vocabulary_share,
            "slots": asdict(self.slots),
            "engine": {name: asdict(each) for name, each in self.engine.items()},
        }


def train(plan: TrainPlan, report: Callable[[Progress], None], say: Callable[[str], None]) -> TrainResult:
    """Runs what is left of a plan.

    Args:
        report: called often, for a progress bar.
        say: called with the lines that a log keeps.

    Raises `ConfigError` for a plan that cannot be followed, or another one than the directory was begun with.
    """
    work = plan.out / "work"
    check_begun(plan, work)
    start = None if plan.start is None else load_block_model(plan.start)
    prompts = training_prompts(plan.prompts, plan.evaluation)
    say(
        f"{len(prompts.prompts)} prompts; refused {prompts.num_refused} that are shared with evaluation prompts, "
        f"left out {prompts.num_repeated} repetitions"
    )
    check_prompts(len(prompts.prompts))
    llm = LLM(plan.target, dtype=plan.dtype, device=plan.device, max_num_seqs=plan.max_num_seqs)
    target = fitting_target(plan, llm.model)
    if start is not None:
        check_start(plan, start.config, target)
    begin(plan, work)
    responses = _answers(llm, plan, prompts, work, report)
    del llm  # training needs the memory of its cache
    kept = [each for each in responses if not is_held_out(each.index, HELD_OUT_EVERY)]
    held = [each for each in responses if is_held_out(each.index, HELD_OUT_EVERY)]
    held_out = {CALIBRATION: held[::2], EVALUATION: held[1::2]}
    for what, some in held_out.items():
        check_held_out(what, some, plan.num_speculative_tokens)
    answer_tokens = sum(len(each.token_ids) for each in responses)
    torch.manual_seed(plan.seed)
    layers = spread_layers(target.config.num_layers, plan.num_feature_layers)
    size = feature_bytes(responses, len(layers), target.config.hidden_size)
    say(f"{answer_tokens} answer tokens; features of layers {layers} take {size / 1e6:.0f} MB in {work}")

    def cached(what: str, some: Sequence[Response]) -> list[Path]:
        def tell(done: int, total: int, tokens: int) -> None:
            report(Progress("features", done, total, f"{tokens} tokens"))

        return cache_features(target, some, layers, work / what, tell)

    files = cached(FEATURES, kept)
    held_files = {what: cached(what, some) for what, some in held_out.items()}
    ids, share = None if start is None else start.draft_ids, 1.0
    if plan.draft_vocab_size is not None and plan.draft_vocab_size < target.config.vocab_size:
        ids, share = draft_vocabulary(files, plan.draft_vocab_size, target.config.vocab_size, ids)
        say(f"draft vocabulary of {len(ids)} tokens holds {share:.2%} of the target's probability")
    network = _network(plan, target, layers, ids, start)
    settings = Settings(
        plan.stages(),
        plan.objective,
        texts=plan.texts,
        anchors=plan.anchors,
        seed=plan.seed,
        autocast=_autocasts(target),
    )
    Trainer(network, files, settings, work).run(lambda each: report(_told(each)))
    report(Progress("calibrate", 0, 1))
    calibrate_confidence(network, held_files[CALIBRATION])
    save_block_model(network.model, plan.out, torch.bfloat16)
    load_block_model(plan.out)  # what was written can be read
    plot_training(work / "metrics.jsonl", plan.out)
    slots = slot_figures(network, held_files[EVALUATION])
    held_prompts = [prompts.prompts[each.index] for each in held_out[EVALUATION][:EVALUATION_PROMPTS]]
    engine: dict[str, EngineFigures] = {}
    for name, temperature, tree in (("greedy", 0.0, False), ("sampled", 1.0, False), ("greedy tree", 0.0, True)):
        report(Progress("evaluate", len(engine), 3, name))
        if tree and not makes_trees(plan.corrector):
            continue
        engine[name] = engine_figures(
            plan.target,
            plan.out,
            held_prompts,
            temperature=temperature,
            max_tokens=plan.max_tokens,
            tree=tree,
            dtype=plan.dtype,
            device=plan.device,
        )
    result = TrainResult(prompts, answer_tokens, share, slots, engine)
    (plan.out / "figures.json").write_text(json.dumps(result.figures(), indent=2) + "\n", encoding="utf-8")
    return result


def _answers(
    llm: LLM, plan: TrainPlan, prompts: TrainingPrompts, work: Path, report: Callable[[Progress], None]
) -> list[Response]:
    def tell(done: int, total: int, tokens: int) -> None:
        report(Progress("regenerate", done, total, f"{tokens} tokens"))

    file = work / "responses.jsonl"
    return regenerate(llm, prompts.prompts, file, max_tokens=plan.max_tokens, seed=plan.seed, progress=tell)


def _network(
    plan: TrainPlan, target: Decoder, layers: Sequence[int], ids: torch.Tensor | None, start: BlockModel | None
) -> Network:
    config = config_for(
        target.config,
        num_layers=plan.num_layers,
        num_draft_tokens=plan.num_speculative_tokens,
        target_layers=layers,
        draft_vocab_size=None if ids is None else len(ids),
        carry=plan.carry,
        conv_taps=plan.conv_taps,
        corrector=plan.corrector,
        corrector_options=plan.corrector_options,
        confidence={},
    )
    model = BlockModel(config, ids)
    model.bind(target.embed)
    if start is None:
        last = range(target.config.num_layers - plan.num_layers, target.config.num_layers)
        start_from_target(model.backbone, open_model_weights(plan.target), list(last))
    else:
        model.start_from(start)
    return Network(model, target, autocast=_autocasts(target))


def _autocasts(target: Decoder) -> bool:
    """Whether bfloat16 products are faster than float32 ones here."""
    if target.device.type == "cuda":
        return True
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() and torch.cpu._is_avx512_bf16_supported()


def _told(progress: TrainingProgress) -> Progress:
    alpha = " ".join(f"{each:.2f}" for each in progress.alpha)
    detail = f"loss {progress.loss:.3f}, acceptance by slot {alpha}, {progress.slots_per_second:.0f} slots/s"
    return Progress(progress.stage, progress.done, progress.total, detail)
