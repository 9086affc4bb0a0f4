"""`foredraft train`: a drafter for one target, from prompts to a directory that every command loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from foredraft.cli.console import note, stdout, write_json
from foredraft.cli.flags import JsonPath
from foredraft.config import require

if TYPE_CHECKING:
    from foredraft.train.run import Progress

DATA = "Data"
DRAFTER = "Drafter"
TRAINING = "Training"

Corrector = Literal["none", "markov", "gated", "rnn", "gru", "bilinear", "lattice", "chain"]
Loss = Literal["ce", "tv", "nla", "lk", "dspark"]
Weights = Literal["exponential", "dpace"]


@dataclass(frozen=True)
class DataFlags:
    """Where texts come from."""

    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts to train on: JSON lines or text; repeatable.", rich_help_panel=DATA),
    ] = None
    evaluation: Annotated[
        list[Path] | None,
        typer.Option(help="Prompts that must not be trained on; repeatable.", rich_help_panel=DATA),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=8, help="Of an answer of the target.", rich_help_panel=DATA)] = 160
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Answers written at once.", rich_help_panel=DATA)] = 32


@dataclass(frozen=True)
class DrafterFlags:
    """What is trained."""

    corrector: Annotated[Corrector, typer.Option(help="Of the drafts.", rich_help_panel=DRAFTER)] = "chain"
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="Slots of a block (γ).", rich_help_panel=DRAFTER)
    ] = 7
    num_layers: Annotated[int, typer.Option(min=1, help="Of the backbone.", rich_help_panel=DRAFTER)] = 2
    num_feature_layers: Annotated[
        int, typer.Option(min=1, help="Target layers that the drafter sees.", rich_help_panel=DRAFTER)
    ] = 4
    draft_vocab_size: Annotated[
        int, typer.Option(min=0, help="Tokens that can be drafted; 0 for all.", rich_help_panel=DRAFTER)
    ] = 8192
    carry: Annotated[
        bool, typer.Option(help="Give every slot the last context row directly.", rich_help_panel=DRAFTER)
    ] = True
    conv_taps: Annotated[
        int, typer.Option(min=0, help="Of causal convolutions in the backbone; 0 for none.", rich_help_panel=DRAFTER)
    ] = 0
    start: Annotated[
        Path | None, typer.Option(help="A drafter to go on from, with its shape.", rich_help_panel=DRAFTER)
    ] = None


@dataclass(frozen=True)
class TrainingFlags:
    """How it is trained."""

    epochs: Annotated[int, typer.Option(min=0, help="Passes of the backbone.", rich_help_panel=TRAINING)] = 8
    corrector_epochs: Annotated[
        int, typer.Option(min=0, help="Of the corrector on the frozen backbone.", rich_help_panel=TRAINING)
    ] = 2
    joint_epochs: Annotated[int, typer.Option(min=0, help="Of both together.", rich_help_panel=TRAINING)] = 2
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak.", rich_help_panel=TRAINING)] = 6e-4
    loss: Annotated[Loss, typer.Option(help="Of a slot.", rich_help_panel=TRAINING)] = "lk"
    weights: Annotated[Weights, typer.Option(help="Of the slots.", rich_help_panel=TRAINING)] = "exponential"
    survival: Annotated[
        float,
        typer.Option(min=0.0, help="Share of the expected accepted length in the loss.", rich_help_panel=TRAINING),
    ] = 0.0
    batch: Annotated[int, typer.Option(min=1, help="Texts in a batch.", rich_help_panel=TRAINING)] = 4
    anchors: Annotated[int, typer.Option(min=1, help="Blocks of a text.", rich_help_panel=TRAINING)] = 64
    seed: Annotated[int, typer.Option(help="Of answers, weights and order.", rich_help_panel=TRAINING)] = 0


def train(
    target: Annotated[str, typer.Option(help="The model to draft for, as --model elsewhere.")],
    out: Annotated[Path, typer.Option(help="The drafter's directory; a killed run goes on from it.")],
    data: DataFlags,
    drafter: DrafterFlags,
    training: TrainingFlags,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of the target.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json_path: JsonPath = None,
) -> None:
    """Train a block drafter for a target: the target answers the prompts, the drafter learns to foresee it."""
    require(bool(data.prompts), "--prompts: give at least one file of prompts to train on")

    from foredraft.train.objective import Objective
    from foredraft.train.plan import TrainPlan
    from foredraft.train.report import print_training
    from foredraft.train.run import train as run_training

    plan = TrainPlan(
        target=target,
        prompts=data.prompts or (),
        evaluation=data.evaluation or (),
        out=out,
        corrector=drafter.corrector,
        corrector_options={} if drafter.corrector == "none" else {"num_candidates": 16},
        num_speculative_tokens=drafter.num_speculative_tokens,
        num_layers=drafter.num_layers,
        num_feature_layers=drafter.num_feature_layers,
        draft_vocab_size=drafter.draft_vocab_size or None,
        carry=drafter.carry,
        conv_taps=drafter.conv_taps,
        start=drafter.start,
        max_tokens=data.max_tokens,
        max_num_seqs=data.max_num_seqs,
        epochs=(training.epochs, training.corrector_epochs, training.joint_epochs),
        learning_rate=training.learning_rate,
        objective=Objective(training.loss, training.weights, training.survival),
        texts=training.batch,
        anchors=training.anchors,
        seed=training.seed,
        dtype=dtype,
        device=device,
    )
    with stage_progress() as report:
        result = run_training(plan, report, note)
    if json_path is not None:
        write_json(result.figures(), json_path)
    if json_path is None or str(json_path) != "-":
        print_training(result, out, stdout())


@contextmanager
def stage_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar for each stage on stderr; where that is no terminal, a line now and then."""
    import sys
    from time import monotonic

    if not sys.stderr.isatty():
        told: dict[str, float] = {}

        def line(progress: Progress) -> None:
            now = monotonic()
            if progress.done == progress.total or now - told.get(progress.stage, 0.0) > 20:
                told[progress.stage] = now
                note(f"{progress.stage}: {progress.done}/{progress.total} {progress.detail}")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Bars(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def update(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bars.add_task(progress.stage, total=progress.total, detail="")
            task = tasks[progress.stage]
            bars.update(task, completed=progress.done, total=progress.total, detail=progress.detail)

        yield update
