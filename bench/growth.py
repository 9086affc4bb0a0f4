"""How a plain decoding step grows with the batch and with the context.

Run: .venv/bin/python -m bench.growth [--out docs/growth]

Times target forwards of one token for each of 1 to 64 requests at 128 to 4096 tokens of context, and fits the
exponents of step time in both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from foredraft.config import EngineConfig
from foredraft.kv.pool import blocks_for
from foredraft.models.batch import ragged_batch
from foredraft.models.decoder import TargetModel
from foredraft.models.load import load_model

BLOCK = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)


def step_seconds(model: TargetModel, batch: int, context: int, repeats: int = 5) -> float:
    """Median seconds of a forward of one token for each of `batch` requests, each with `context` tokens of its own."""
    blocks = blocks_for(context + 1, BLOCK)
    cache = model.new_cache(blocks * batch, BLOCK)
    cache.k.zero_()
    cache.v.zero_()
    tables = [[*range(blocks * request, blocks * (request + 1))] for request in range(batch)]
    tokens = [[request + 5] for request in range(batch)]
    forward = ragged_batch(tokens, [context] * batch, tables, [1] * batch, block_size=BLOCK, device=model.device)
    taken = []
    for _ in range(repeats + 2):
        start = perf_counter()
        model.forward(forward, cache)
        taken.append(perf_counter() - start)
    return median(taken[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("docs/growth"))
    arguments = parser.parse_args()
    model = load_model(EngineConfig(arguments.model)).model
    contexts = [each for each in CONTEXTS if each < model.config.max_model_len]
    seconds = {batch: {context: step_seconds(model, batch, context) for context in contexts} for batch in BATCHES}
    print("ms a step; batch down, context across")
    print("      " + " ".join(f"{context:>8}" for context in contexts))
    for batch, row in seconds.items():
        print(f"{batch:>5} " + " ".join(f"{1e3 * value:>8.2f}" for value in row.values()))
    by_batch = exponent(BATCHES, [seconds[batch][contexts[1]] for batch in BATCHES])
    by_context = exponent(contexts, [seconds[16][context] for context in contexts])
    print(f"step time ~ batch^{by_batch:.2f} at context {contexts[1]}, ~ context^{by_context:.2f} at batch 16")
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = {"seconds": seconds, "batch_exponent": by_batch, "context_exponent": by_context}
    (arguments.out / "figures.json").write_text(json.dumps(figures, indent=2))
    plot(seconds, contexts, arguments.out)


def exponent(sizes: tuple[int, ...] | list[int], seconds: list[float]) -> float:
    """Slope of log seconds over log size."""
    return float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])


def plot(seconds: dict[int, dict[int, float]], contexts: list[int], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for context in contexts:
        left.plot(BATCHES, [1e3 * seconds[batch][context] for batch in BATCHES], marker="o", label=str(context))
    for batch in BATCHES:
        right.plot(contexts, [1e3 * seconds[batch][context] for context in contexts], marker="o", label=str(batch))
    left.set(xscale="log", yscale="log", xlabel="batch", ylabel="step (ms)", title="By batch, for each context")
    right.set(xscale="log", yscale="log", xlabel="context (tokens)", title="By context, for each batch")
    for axes in (left, right):
        axes.legend(frameon=False, ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    for kind in ("svg", "png"):
        figure.savefig(out / f"growth.{kind}", dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
