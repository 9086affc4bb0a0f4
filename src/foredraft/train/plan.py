"""What to train and from what, and whether it can be followed: everything that is refused before work begins."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foredraft.config import require, require_choice
from foredraft.draft.backbone_config import BlockConfig, check_target, spread_layers
from foredraft.draft.correctors import CORRECTORS
from foredraft.errors import ConfigError
from foredraft.models.decoder import Decoder, TargetModel
from foredraft.train.objective import Objective
from foredraft.train.regenerate import Response
from foredraft.train.trainer import NUM_TOP, Stage

FEATURES, CALIBRATION, EVALUATION = "features", "calibration", "evaluation"
"""Folders of features in the work directory; the latter two, of texts held out, share none."""
HELD_OUT_EVERY = 32
LEAST_HELD_OUT = 2
"""One text to calibrate on and another to measure on."""


@dataclass(frozen=True)
class TrainPlan:
    """What to train and from what.

    Args:
        target: the model to draft for, as `LLM` takes it.
        prompts, evaluation: prompt files to train on, and those whose prompts must not be among them.
        corrector: a name of `draft.correctors`; its options in `corrector_options`.
        num_speculative_tokens: γ, the slots of a block.
        num_layers: of the backbone; they start as the target's last ones.
        num_feature_layers: target layers whose outputs are the context.
        draft_vocab_size: tokens that can be drafted; None for the target's whole vocabulary.
        carry: give every slot the last context row, through a matrix of its own.
        conv_taps: of the causal convolutions around the backbone's sublayers; 0 for none.
        start: a drafter whose weights and draft vocabulary are the start; None to start from the target's last layers.
            What the plan adds to it (the carry, another corrector) starts as new.
        max_tokens: of an answer.
        epochs: passes of the stages backbone, corrector and joint.
        learning_rate: peak of the backbone's first stage; the corrector's is three times, the joint stage's a sixth.
        dtype: of the target while it answers.
    """

    target: str
    prompts: Sequence[Path]
    out: Path
    evaluation: Sequence[Path] = ()
    corrector: str = "chain"
    corrector_options: dict[str, Any] = field(default_factory=dict)
    num_speculative_tokens: int = 7
    num_layers: int = 2
    num_feature_layers: int = 4
    draft_vocab_size: int | None = 8192
    carry: bool = True
    conv_taps: int = 0
    start: Path | None = None
    max_tokens: int = 160
    epochs: tuple[int, int, int] = (8, 2, 2)
    learning_rate: float = 6e-4
    objective: Objective = field(default_factory=Objective)
    texts: int = 4
    anchors: int = 64
    seed: int = 0
    dtype: str = "bfloat16"
    device: str = "auto"
    max_num_seqs: int = 32

    def __post_init__(self) -> None:
        require_choice("--corrector", self.corrector, tuple(CORRECTORS))
        require(
            sum(self.epochs) > 0, "--epochs, --corrector-epochs and --joint-epochs: all are 0; nothing would be trained"
        )
        require(
            self.conv_taps <= self.num_speculative_tokens,
            f"--conv-taps: {self.conv_taps} is above the {self.num_speculative_tokens} slots of a block "
            "(--num-speculative-tokens)",
        )
        require(
            self.draft_vocab_size is None or self.draft_vocab_size >= NUM_TOP,
            f"--draft-vocab-size: {self.draft_vocab_size} is below the {NUM_TOP} candidates of a slot; use at least "
            f"{NUM_TOP}, or 0 for the target's whole vocabulary",
        )

    def stages(self) -> tuple[Stage, ...]:
        rate, (backbone, corrector, joint) = self.learning_rate, self.epochs
        return (
            Stage("backbone", backbone, rate, 0.0, (1.0, 1.0)),
            Stage("corrector", corrector, 0.0, 3 * rate, (0.0, 0.0)),
            Stage("joint", joint, rate / 6, rate, (0.5, 0.1)),
        )


def check_begun(plan: TrainPlan, work: Path) -> None:
    """Raises `ConfigError` when the directory was begun with another plan."""
    file = work / "plan.json"
    if not file.exists():
        return
    found, begun = _as_json(plan), json.loads(file.read_text(encoding="utf-8"))
    differences = [key for key in found if begun.get(key) != found[key]]
    require(
        not differences,
        f"--out {plan.out}: it was begun with another plan ({', '.join(differences)} differ); give the flags that it "
        "was begun with to go on, or another directory",
    )


def begin(plan: TrainPlan, work: Path) -> None:
    """Makes the directory this plan's."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "plan.json").write_text(json.dumps(_as_json(plan), indent=2) + "\n", encoding="utf-8")


def check_prompts(count: int) -> None:
    """Raises `ConfigError` when too few of `count` prompts are held out."""
    least = LEAST_HELD_OUT * HELD_OUT_EVERY
    require(
        count >= least,
        f"--prompts: {count} are too few, since one in {HELD_OUT_EVERY} is held out to calibrate or to measure on; "
        f"give at least {least}",
    )


def check_held_out(what: str, responses: Sequence[Response], num_slots: int) -> None:
    """Raises `ConfigError` when no answer is long enough for an anchor and a whole block after it."""
    longest = max(len(each.token_ids) for each in responses)
    require(
        longest > num_slots,
        f"--num-speculative-tokens: {num_slots}, but the longest answer held out for {what} has {longest} tokens; "
        "lower it, raise --max-tokens, or give other prompts",
    )


def fitting_target(plan: TrainPlan, target: TargetModel) -> Decoder:
    """The target, if a drafter as planned can be made for it; else raises `ConfigError`."""
    if not isinstance(target, Decoder):
        raise ConfigError(f"--target {plan.target}: it runs through transformers; drafters need one that runs natively")
    layers = target.config.num_layers
    for flag, value in (("--num-layers", plan.num_layers), ("--num-feature-layers", plan.num_feature_layers)):
        require(value <= layers, f"{flag}: {value} is above the {layers} layers of the target; use at most {layers}")
    return target


def check_start(plan: TrainPlan, start: BlockConfig, target: Decoder) -> None:
    """Raises `ConfigError` when the drafter to start from has another shape than the plan's, naming the flag.

    Raises `DrafterError` when it was made for another target.
    """
    check_target(start, target.config, f"--start {plan.start}")
    layers = spread_layers(target.config.num_layers, plan.num_feature_layers)
    vocabulary = plan.draft_vocab_size or target.config.vocab_size
    for flag, planned, found in (
        ("--num-speculative-tokens", plan.num_speculative_tokens, start.num_draft_tokens),
        ("--num-layers", plan.num_layers, start.num_layers),
        ("--num-feature-layers", list(layers), list(start.target_layers)),
        ("--draft-vocab-size", vocabulary, start.draft_vocab_size or start.vocab_size),
        ("--conv-taps", plan.conv_taps, start.conv_taps),
        ("--carry", plan.carry, plan.carry or start.carry),
    ):
        require(planned == found, f"{flag}: {planned}, but the drafter of --start {plan.start} has {found}")


def _as_json(plan: TrainPlan) -> dict[str, Any]:
    """The plan as it is kept; where its drafter goes does not count."""
    fields = {key: value for key, value in asdict(plan).items() if key != "out"}
    return dict(json.loads(json.dumps(fields, default=str)))
