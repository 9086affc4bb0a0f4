"""The comparison's tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_report(figures: dict[str, Any], out: Path) -> None:
    """Writes `tables.md`, `tau.svg` and `slots.svg` (and both as PNG)."""
    (out / "tables.md").write_text("\n".join([*_tau(figures), "", *_slots(figures), "", *_times(figures)]) + "\n")
    _plots(figures, out)


def _settings(figures: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(run["setting"] for run in figures["runs"]))


def _tau(figures: dict[str, Any]) -> list[str]:
    settings = _settings(figures)
    lines = ["| τ, mean over prompts (95 %) | " + " | ".join(settings) + " |", "| --- |" + " ---: |" * len(settings)]
    for name in figures["slots"]:
        cells = []
        for setting in settings:
            run = _run(figures, name, setting)
            tau = run["tau"]["all"] if run else None
            cells.append(f"{tau['mean']:.2f} ({tau['low']:.2f}–{tau['high']:.2f})" if tau else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    domains = [domain for domain in figures["runs"][0]["tau"] if domain != "all"]
    lines += ["", "| τ, greedy chain | " + " | ".join(domains) + " |", "| --- |" + " ---: |" * len(domains)]
    for name in figures["slots"]:
        run = _run(figures, name, "greedy chain")
        assert run is not None
        lines.append(f"| {name} | " + " | ".join(f"{run['tau'][domain]['mean']:.2f}" for domain in domains) + " |")
    return lines


def _slots(figures: dict[str, Any]) -> list[str]:
    count = len(next(iter(figures["slots"].values()))["alpha"])
    lines = [
        "| acceptance by slot, teacher-forced | " + " | ".join(str(slot) for slot in range(count)) + " | parameters |",
        "| --- |" + " ---: |" * (count + 1),
    ]
    for name, slots in figures["slots"].items():
        cells = [f"{100 * each:.1f} %" for each in slots["alpha"]]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {slots['parameters']:,} |")
    return lines


def _times(figures: dict[str, Any]) -> list[str]:
    lines = ["| greedy chain, ms per step | draft | verify | whole step |", "| --- | ---: | ---: | ---: |"]
    for name in figures["slots"]:
        run = _run(figures, name, "greedy chain")
        assert run is not None
        lines.append(f"| {name} | {run['draft_ms']:.2f} | {run['verify_ms']:.2f} | {run['step_ms']:.2f} |")
    return lines


def _run(figures: dict[str, Any], name: str, setting: str) -> dict[str, Any] | None:
    found = [run for run in figures["runs"] if run["corrector"] == name and run["setting"] == setting]
    return found[0] if found else None


def _plots(figures: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names, settings = list(figures["slots"]), _settings(figures)
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    for index, setting in enumerate(settings):
        for place, name in enumerate(names):
            run = _run(figures, name, setting)
            if run is None:
                continue
            tau, at = run["tau"]["all"], place + (index - (len(settings) - 1) / 2) * 0.14
            axes.errorbar(
                at,
                tau["mean"],
                [[tau["mean"] - tau["low"]], [tau["high"] - tau["mean"]]],
                fmt="o",
                markersize=4,
                color=f"C{index}",
                label=setting if place == names.index("none" if "none" in names else names[0]) else None,
            )
    axes.set_xticks(range(len(names)), names)
    axes.set(ylabel="τ, tokens per target forward", title="Correctors on one backbone, 95 % intervals")
    axes.legend(frameon=False, ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, out / "tau")
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, slots in figures["slots"].items():
        axes.plot(slots["alpha"], marker="o", markersize=3, label=name)
    axes.set(xlabel="slot", ylabel="given the true tokens before", title="Acceptance by slot, held-out texts")
    axes.legend(frameon=False, ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, out / "slots")


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    for kind in ("svg", "png"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=120)
    pyplot.close(figure)
