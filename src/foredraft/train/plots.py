"""Loss and acceptance over the course of training, as an image."""

from __future__ import annotations

import json
from pathlib import Path


def plot_training(metrics: Path, directory: Path) -> None:
    """Draws `training.svg` and `training.png` from a metrics file: the loss, and acceptance by slot, over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    if not lines:
        return
    minutes = [line["seconds"] / 60 for line in lines]
    figure, (losses, acceptance) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for stage in dict.fromkeys(line["stage"] for line in lines):
        members = [index for index, line in enumerate(lines) if line["stage"] == stage]
        losses.plot([minutes[i] for i in members], [lines[i]["loss"] for i in members], label=stage, linewidth=1)
        acceptance.axvline(minutes[members[0]], color="0.8", linewidth=0.8)
    losses.set(xlabel="minutes", ylabel="loss", title="Loss by stage", yscale="log")
    losses.legend(frameon=False)
    slots = len(lines[0]["alpha"])
    colours = pyplot.get_cmap("viridis")
    for slot in range(slots):
        values = [line["alpha"][slot] for line in lines]
        acceptance.plot(minutes, values, color=colours(slot / max(slots - 1, 1)), label=f"slot {slot}", linewidth=1)
    acceptance.set(
        xlabel="minutes", ylabel="acceptance, given the tokens before", title="Acceptance by slot", ylim=(0, 1)
    )
    acceptance.legend(frameon=False, ncols=2)
    for axes in (losses, acceptance):
        axes.spines[["top", "right"]].set_visible(False)
    for kind in ("svg", "png"):
        figure.savefig(directory / f"training.{kind}", dpi=120)
    pyplot.close(figure)
