"""A bench run as JSON (the keys of design.md) and as tables for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from foredraft.engine.llm import LLM
from foredraft.measure.bench import BASELINE, SPECULATIVE, TRANSFORMERS, BenchRun
from foredraft.measure.figures import Round, Spread, acceptance, mode_figures, ratio, step_split

MEBIBYTE = 1 << 20
MODES = (BASELINE, SPECULATIVE, TRANSFORMERS)
_ROWS = (
    ("tokens per second", "tokens_per_second", "{:.1f}"),
    ("  range over rounds", "tokens_per_second_range", "{:.1f}"),
    ("latency, median (s)", "latency_s", "{:.3f}"),
    ("first token, median (s)", "ttft_s", "{:.3f}"),
    ("per further token, median (ms)", "tpot_s", "{:.1f}"),
    ("requests per second", "requests_per_second", "{:.2f}"),
    ("target forwards", "steps", "{:d}"),
    ("peak memory (MiB)", "peak_memory_bytes", "{:.0f}"),
)


def bench_json(run: BenchRun, llm: LLM) -> dict[str, Any]:
    """All figures of a run; the speed-ups are None when outputs differ where they must not."""
    speculative = llm.config.speculative
    drafter = llm.engine.drafter
    assert speculative is not None
    assert drafter is not None
    accepted = acceptance(run.rounds[SPECULATIVE])
    split = step_split(run.rounds[SPECULATIVE])
    speedup = None if run.broken else _speedup(run)
    gain = None if run.broken else _gain(run, SPECULATIVE, BASELINE)
    figures: dict[str, Any] = {
        "model": llm.config.model,
        "drafter": llm.drafter_name,
        "method": speculative.method,
        "corrector": drafter.corrector,
        "verification": speculative.verification or ("block" if run.params.seed is None else "coupled"),
        "dtype": llm.config.dtype,
        "device": str(llm.model.device),
        "threads": torch.get_num_threads(),
        "gamma": speculative.num_speculative_tokens,
        "adaptive": speculative.adaptive,
        "batch": run.batch,
        "prompts": len(run.prompts),
        "new_tokens": sum(len(sample.token_ids) for sample in run.rounds[BASELINE][0].samples),
        "rounds": len(run.rounds[BASELINE]),
        "max_tokens": run.params.max_tokens,
        "temperature": run.params.temperature,
        "chat_template": run.chat_template,
        **{mode: mode_figures(run.rounds[mode]) for mode in MODES if mode in run.rounds},
        "speedup": speedup.median if speedup else None,
        "speedup_range": [speedup.low, speedup.high] if speedup else None,
        "throughput_gain": gain.median if gain else None,
        "mean_acceptance_length": accepted.mean_acceptance_length,
        "mean_draft_length": accepted.mean_draft_length,
        "steps_per_draft_length": accepted.steps_per_draft_length,
        "acceptance_rate": accepted.acceptance_rate,
        "acceptance_rate_per_position": accepted.acceptance_rate_per_position,
        "draft_time_fraction": split.get("draft"),
        "step_time_fractions": {BASELINE: step_split(run.rounds[BASELINE]), SPECULATIVE: split},
        "outputs_identical": None if run.promise == "none" else SPECULATIVE not in run.differences,
        "identity_promised": run.promise,
        "first_difference": _difference(run, SPECULATIVE),
        "forward_cost": asdict(run.forward),
        "memory": None if TRANSFORMERS in run.rounds else _memory(run, llm),
        "per_prompt": [_prompt_figures(run, index) for index in range(len(run.prompts))],
    }
    if TRANSFORMERS in run.rounds:
        plain = _gain(run, BASELINE, TRANSFORMERS)
        figures["compared_with_transformers"] = {
            "plain_gain": plain.median,
            "plain_gain_range": [plain.low, plain.high],
            "outputs_identical": TRANSFORMERS not in run.differences,
            "first_difference": _difference(run, TRANSFORMERS),
        }
    return figures


def print_report(figures: Mapping[str, Any], run: BenchRun, console: Console) -> None:
    """Prints the tables and the verdict on identity; no speed-up when outputs differ where they must not."""
    console.print(_headline(figures))
    console.print(_modes_table(figures))
    console.print(_prompts_table(figures, run))
    console.print(_acceptance_line(figures))
    console.print(_split_line(figures))
    if figures["memory"] is not None:
        console.print(_memory_line(figures["memory"]))
    cost = figures["forward_cost"]
    console.print(
        f"a target forward over {cost['num_tokens']} tokens costs {cost['ratio']['median']:.2f}× one over 1 "
        f"({cost['tokens_s'] * 1e3:.1f} to {cost['one_token_s'] * 1e3:.1f} ms, context {cost['context']})"
    )
    if TRANSFORMERS in figures:
        console.print(_transformers_line(figures, run))
    console.print(_identity_line(figures, run, SPECULATIVE))
    if figures["speedup"] is not None:
        low, high = figures["speedup_range"]
        console.print(
            f"[bold]speed-up {figures['speedup']:.2f}×[/bold] (rounds {low:.2f} to {high:.2f}), "
            f"throughput gain {figures['throughput_gain']:.2f}×"
        )


def _speedup(run: BenchRun) -> Spread:
    """How much less a request waits per token, round by round."""
    return ratio(
        [each.latency_per_token for each in run.rounds[BASELINE]],
        [each.latency_per_token for each in run.rounds[SPECULATIVE]],
    )


def _gain(run: BenchRun, faster: str, slower: str) -> Spread:
    return ratio(
        [each.tokens_per_second for each in run.rounds[faster]],
        [each.tokens_per_second for each in run.rounds[slower]],
    )


def _difference(run: BenchRun, mode: str) -> dict[str, Any] | None:
    found = run.differences.get(mode)
    if found is None:
        return None
    return {"prompt": found.where.prompt, "position": found.where.position, "margin": found.margin}


def _memory(run: BenchRun, llm: LLM) -> dict[str, int]:
    peaks = [each.peak_memory for mode in (BASELINE, SPECULATIVE) for each in run.rounds[mode]]
    weights, cache = llm.model.weight_bytes, llm.kv_cache_bytes_used_peak
    return {
        "weight_bytes": weights,
        "kv_cache_bytes": cache,
        "kv_bytes_per_token": llm.model.kv_bytes_per_token,
        "peak_memory_bytes": max(peaks),
        "process_peak_memory_bytes": run.load_peak,
        "besides_weights_and_cache_bytes": max(peaks) - weights - cache,
    }


def _prompt_figures(run: BenchRun, index: int) -> dict[str, Any]:
    plain, drafted = _of_prompt(run.rounds[BASELINE], index), _of_prompt(run.rounds[SPECULATIVE], index)
    stats = acceptance(drafted)
    rates = {
        mode: median(each.num_tokens / each.seconds for each in rounds)
        for mode, rounds in ((BASELINE, plain), (SPECULATIVE, drafted))
    }
    speedup = ratio([each.latency_per_token for each in plain], [each.latency_per_token for each in drafted])
    record = run.prompts[index]
    return {
        "name": record.name or str(index + 1),
        "kind": record.kind,
        "new_tokens": plain[0].num_tokens,
        "baseline_tokens_per_second": rates[BASELINE],
        "speculative_tokens_per_second": rates[SPECULATIVE],
        "speedup": None if run.broken else speedup.median,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "outputs_identical": None
        if run.promise == "none"
        else all(a.samples[0].token_ids == b.samples[0].token_ids for a, b in zip(plain, drafted, strict=True)),
    }


def _of_prompt(rounds: Sequence[Round], index: int) -> list[Round]:
    """Each round with one prompt alone; its time is what that prompt waited."""
    chosen = [next(sample for sample in each.samples if sample.prompt == index) for each in rounds]
    return [Round(samples=[sample], seconds=sample.latency) for sample in chosen]


def _headline(figures: Mapping[str, Any]) -> str:
    return (
        f"[bold]{figures['model']}[/bold], {figures['dtype']} on {figures['device']}, "
        f"{figures['threads']} threads; drafter {figures['drafter']}, γ = {figures['gamma']}; "
        f"batch {figures['batch']}, {figures['prompts']} prompts × {figures['rounds']} rounds, "
        f"{figures['new_tokens']} new tokens a round"
    )


def _modes_table(figures: Mapping[str, Any]) -> Table:
    modes = [mode for mode in MODES if mode in figures]
    table = Table("", *modes)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, key, form in _ROWS:
        table.add_row(label, *(_cell(figures[mode][key], key, form) for mode in modes))
    return table


def _cell(value: Any, key: str, form: str) -> str:
    if isinstance(value, Mapping):
        value = value["p50"]
    if isinstance(value, list):
        return " – ".join(form.format(each) for each in value)
    if value is None or (key == "peak_memory_bytes" and not value):
        return "–"
    scale = {"tpot_s": 1e3, "peak_memory_bytes": 1 / MEBIBYTE}.get(key)
    return form.format(value if scale is None else value * scale)


def _prompts_table(figures: Mapping[str, Any], run: BenchRun) -> Table:
    table = Table(
        "prompt",
        "kind",
        "tokens",
        "baseline (tokens/s)",
        "speculative (tokens/s)",
        "speed-up",
        "τ",
        "same text",
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for each in figures["per_prompt"]:
        table.add_row(
            each["name"],
            each["kind"] or "",
            str(each["new_tokens"]),
            f"{each['baseline_tokens_per_second']:.1f}",
            f"{each['speculative_tokens_per_second']:.1f}",
            "–" if each["speedup"] is None else f"{each['speedup']:.2f}×",
            f"{each['mean_acceptance_length']:.2f}",
            {True: "yes", False: "no", None: "–"}[each["outputs_identical"]],
        )
    return table


def _acceptance_line(figures: Mapping[str, Any]) -> str:
    positions = " ".join(f"{rate:.2f}" for rate in figures["acceptance_rate_per_position"])
    return (
        f"τ = {figures['mean_acceptance_length']:.2f} tokens per target forward, acceptance rate "
        f"{figures['acceptance_rate']:.1%}, by position {positions or '–'}"
    )


def _split_line(figures: Mapping[str, Any]) -> str:
    lines = []
    for mode, split in figures["step_time_fractions"].items():
        shares = ", ".join(f"{phase} {split[phase]:.1%}" for phase in split if phase != "outside_models")
        lines.append(f"step time, {mode}: {shares}; outside the models {split.get('outside_models', 0):.1%}")
    return "\n".join(lines)


def _memory_line(memory: Mapping[str, int]) -> str:
    mib = {name: f"{size / MEBIBYTE:.0f}" for name, size in memory.items()}
    return (
        f"peak memory {mib['peak_memory_bytes']} MiB = weights {mib['weight_bytes']} + KV cache in use "
        f"{mib['kv_cache_bytes']} + other {mib['besides_weights_and_cache_bytes']}; "
        f"peak while loading {mib['process_peak_memory_bytes']} MiB"
    )


def _transformers_line(figures: Mapping[str, Any], run: BenchRun) -> str:
    compared = figures["compared_with_transformers"]
    low, high = compared["plain_gain_range"]
    return (
        f"plain decoding runs at {compared['plain_gain']:.2f}× transformers' generate "
        f"(rounds {low:.2f} to {high:.2f}). " + _identity_line(figures, run, TRANSFORMERS)
    )


def _identity_line(figures: Mapping[str, Any], run: BenchRun, mode: str) -> str:
    name = "transformers'" if mode == TRANSFORMERS else "speculative"
    if run.promise == "none":
        return f"{name} outputs are not compared: sampling promises the same distribution, not the same text"
    if mode not in run.differences:
        count = len(run.prompts)
        return f"[green]{name} outputs are identical[/green] to plain decoding's on all {count} prompts"
    found = _difference(run, mode)
    assert found is not None
    place = f"first at prompt {found['prompt'] + 1}, token {found['position'] + 1}"
    if found["margin"] is None:
        gap = "where one of the outputs had ended"
    else:
        gap = f"where the target's logits for the two tokens are {found['margin']:.4f} apart"
        gap += ": a near-tie, which rounding decides" if run.near_tie(mode) else ""
    broken = mode == SPECULATIVE and run.broken
    text = f"{name} outputs differ from plain decoding's, {place}, {gap}"
    return f"[bold red]{text}; no speed-up is reported[/bold red]" if broken else f"[yellow]{text}[/yellow]"
