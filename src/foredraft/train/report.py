"""The result of a training as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foredraft.train.run import TrainResult

if TYPE_CHECKING:
    from rich.console import Console


def print_training(result: TrainResult, out: Path, console: Console) -> None:
    """Acceptance by slot, then what the engine measured."""
    from rich.table import Table

    slots = result.slots
    table = Table(title="Acceptance by slot on held-out texts, given the true tokens before it")
    table.add_column("slot", justify="right")
    table.add_column("backbone alone", justify="right")
    table.add_column("corrected", justify="right")
    for count in slots.recall:
        table.add_column(f"recall@{count}", justify="right")
    for slot, (base, corrected) in enumerate(zip(slots.alpha_base, slots.alpha, strict=True)):
        recall = [f"{each[slot]:.1%}" for each in slots.recall.values()]
        table.add_row(str(slot), f"{base:.1%}", f"{corrected:.1%}", *recall)
    console.print(table)
    gain = slots.expected_length / slots.expected_length_base - 1
    console.print(
        f"expected tokens per step {slots.expected_length:.2f}, backbone alone {slots.expected_length_base:.2f} "
        f"({gain:+.1%}); {slots.num_slots} slots"
    )
    if slots.calibration_error is not None:
        console.print(f"calibration error of the predicted acceptance {slots.calibration_error:.1%}")
    for name, figures in result.engine.items():
        rates = " ".join(f"{rate:.2f}" for rate in figures.acceptance_rate_per_position)
        console.print(
            f"engine, {name}: τ = {figures.mean_acceptance_length:.2f} tokens per target forward; by position {rates}"
        )
    console.print(f"drafter in {out}; use it with --speculative-model {out}")
