"""Plain decoding, every fixed draft length and adaptive lengths, at several batch sizes, in turns in one process.

Run: .venv/bin/python -m bench.lengths [--drafter DIR] [--prompts FILE …] [--json PATH]

For each batch size the same prompts, three times as many, are decoded in every mode, round after round, so that a
request that ends early makes room for the next: of one batch alone, only the slowest request would be timed. A figure
is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from foredraft import LLM, SamplingParams, SpeculativeConfig
from foredraft.measure.prompts import PromptRecord, demo_prompts, encoded, read_prompts


def engines(arguments: argparse.Namespace, batch: int) -> dict[str, LLM]:
    """An engine for each mode, with `batch` requests at once."""
    options: dict[str, Any] = {"method": arguments.method, "model": arguments.drafter}

    def engine(speculative: SpeculativeConfig | None) -> LLM:
        return LLM(arguments.model, speculative=speculative, max_num_seqs=batch, kv_cache_memory=10**9)

    found = {"plain": engine(None)}
    for gamma in arguments.fixed:
        found[f"γ={gamma}"] = engine(SpeculativeConfig(**options, num_speculative_tokens=gamma, adaptive=False))
    found["adaptive"] = engine(SpeculativeConfig(**options, num_speculative_tokens=7))
    return found


def tokens_per_second(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
    start = perf_counter()
    outputs = llm.generate(prompts, params)
    return sum(len(each.outputs[0].token_ids) for each in outputs) / (perf_counter() - start)


def measured(arguments: argparse.Namespace, batch: int, records: Sequence[PromptRecord]) -> dict[str, list[float]]:
    """Tokens per second of each mode, round by round; its engines are gone when it returns."""
    llms = engines(arguments, batch)
    params = SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature, ignore_eos=True)
    texts = [encoded(llms["plain"], record.prompt) for record in records]
    group = [texts[index % len(texts)] for index in range(3 * batch)]
    rates: dict[str, list[float]] = {mode: [] for mode in llms}
    for turn in range(arguments.rounds + 1):
        for mode, llm in llms.items():
            rate = tokens_per_second(llm, group, params)
            if turn:  # the first round warms up, and lets the adaptive lengths learn
                rates[mode].append(rate)
            print(f"\rbatch {batch}, round {turn}: {mode}      ", end="", file=sys.stderr)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--method", default=None)
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3, 5, 7])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    records = [record for path in arguments.prompts for record in read_prompts(path)] or demo_prompts()
    figures: dict[int, dict[str, Any]] = {}
    modes = [*(f"γ={gamma}" for gamma in arguments.fixed), "adaptive"]
    print(f"{'batch':>5} {'plain':>8} " + " ".join(f"{mode:>9}" for mode in modes))
    for batch in arguments.batch:
        rates = measured(arguments, batch, records)
        ratios = {
            mode: [own / plain for own, plain in zip(values, rates["plain"], strict=True)]
            for mode, values in rates.items()
        }
        figures[batch] = {"tokens_per_second": rates, "ratios": ratios}
        cells = " ".join(f"{median(values):>8.2f}×" for mode, values in ratios.items() if mode != "plain")
        print(f"\r{batch:>5} {median(rates['plain']):>8.1f} {cells}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
