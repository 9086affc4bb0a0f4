"""Measures at start-up what a target's forward and a drafter's drafting cost, in a few seconds.

Runs before there are requests, over the engine's own cache. Texts are varied token ids, so that a model with experts
routes as it does at work: one token repeated would wake few of them and make long drafts look cheap.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TypeVar

import torch

from foredraft.draft.drafter import Drafter, DraftRequest, Observation
from foredraft.engine.costs import CostCurve, Curve, measured_sizes
from foredraft.kv.cache import KVCache
from foredraft.kv.pool import blocks_for
from foredraft.models.batch import ragged_batch
from foredraft.models.decoder import TargetModel
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState

BUDGET = 3.0
"""Seconds that measuring may take, half of them for the target."""

CHECK_BUDGET = 0.5
"""Seconds that looking at kept costs may take."""

TOO_HIGH = 1.5
"""Times that kept costs may exceed what is seen."""

CONTEXT = 64
"""Tokens that each measured request holds before."""

MOST_REQUESTS = 4
PASSES = 5

Case = TypeVar("Case", bound=Hashable)


@dataclass(frozen=True)
class Bench:
    """Requests to measure with: texts, each with its own blocks of the cache."""

    texts: list[list[int]]
    context: int
    tables: list[list[int]]

    @property
    def capacity(self) -> int:
        """Tokens that one forward can take."""
        return sum(len(text) - self.context for text in self.texts)


def measure_costs(
    model: TargetModel, cache: KVCache, drafter: Drafter, *, gamma: int, max_num_seqs: int, budget: float = BUDGET
) -> CostCurve:
    """The costs of an engine that holds no request yet.

    Args:
        gamma: longest draft.
        max_num_seqs: requests that run at once; with `gamma` it bounds the tokens of a forward that drafts decide on.
        budget: seconds; sizes that do not fit into it are left to the curve's last slope.
    """
    bench = _bench(model, cache, gamma, max_num_seqs)
    starts = [0] * len(bench.texts)
    prompts = [text[: bench.context] for text in bench.texts]
    with torch.inference_mode():
        features = _forward(model, cache, bench, prompts, starts, drafter.feature_layers)
        target = _target_curve(model, cache, bench, gamma, max_num_seqs, budget / 2)
        drafts, catch_up = _draft_curves(model, drafter, bench, features, gamma, budget / 2)
    return CostCurve(target, drafts, catch_up)


def are_too_high(costs: CostCurve, model: TargetModel, cache: KVCache, *, gamma: int, max_num_seqs: int) -> bool:
    """Whether a forward turns out much faster than kept costs say: they were measured while something else ran.

    Slower ones prove nothing, since something may run now.
    """
    bench = _bench(model, cache, gamma, max_num_seqs)
    known = costs.target.sizes
    sizes = sorted({known[0], min(gamma + 1, known[-1]), known[len(known) // 2]})
    with torch.inference_mode():
        cases = [(size, _decoding(model, cache, bench, gamma, size)) for size in sizes]
        seconds = _timed([case for case in cases if case[0] <= bench.capacity], CHECK_BUDGET)
    return any(took * TOO_HIGH < costs.target.at(size) for size, took in seconds.items())


def _bench(model: TargetModel, cache: KVCache, gamma: int, max_num_seqs: int) -> Bench:
    """As many requests as the cache and the model's context hold, up to four."""
    size, limit = cache.block_size, model.config.max_model_len
    room = min(64 + gamma + 1, max(limit // 2, 1))
    context = max(1, min(CONTEXT, limit - room))
    length = min(context + room, limit)
    count = max(1, min(MOST_REQUESTS, max_num_seqs, cache.num_blocks // blocks_for(length, size)))
    length = min(length, cache.num_blocks // count * size)
    generator = random.Random(0)
    texts = [[generator.randrange(model.config.vocab_size) for _ in range(length)] for _ in range(count)]
    per_request = blocks_for(length, size)
    tables = [list(range(row * per_request, (row + 1) * per_request)) for row in range(count)]
    return Bench(texts, max(1, min(context, length - gamma - 1)), tables)


def _forward(
    model: TargetModel,
    cache: KVCache,
    bench: Bench,
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    layers: Sequence[int] = (),
) -> Sequence[torch.Tensor]:
    """One forward over the first requests' `tokens`, to the tokens that it chooses; returns features."""
    batch = ragged_batch(
        tokens,
        starts,
        bench.tables[: len(tokens)],
        [len(ids) for ids in tokens],
        block_size=cache.block_size,
        device=model.device,
    )
    output = model.forward(batch, cache, layers)
    output.logits.argmax(-1).tolist()  # waits for the device
    return output.features


def _target_curve(
    model: TargetModel, cache: KVCache, bench: Bench, gamma: int, max_num_seqs: int, budget: float
) -> Curve:
    sizes = [size for size in measured_sizes(min(max_num_seqs * (gamma + 1), 512)) if size <= bench.capacity]
    seconds = _timed([(size, _decoding(model, cache, bench, gamma, size)) for size in sizes], budget)
    return Curve(list(seconds), list(seconds.values()))


def _decoding(model: TargetModel, cache: KVCache, bench: Bench, gamma: int, size: int) -> Callable[[], object]:
    """A forward of `size` tokens as decoding would fill the batch: requests with full drafts."""
    count = max(1, min(len(bench.texts), -(-size // (gamma + 1))))
    shares = [size // count + (row < size % count) for row in range(count)]
    tokens = [text[bench.context : bench.context + share] for text, share in zip(bench.texts, shares, strict=False)]
    return partial(_forward, model, cache, bench, tokens, [bench.context] * len(tokens))


def _draft_curves(
    model: TargetModel,
    drafter: Drafter,
    bench: Bench,
    features: Sequence[torch.Tensor],
    gamma: int,
    budget: float,
) -> tuple[dict[int, Curve], float]:
    """Seconds of drafting by depth and batch, and of catching up per token."""
    count, context = len(bench.texts), bench.context
    ids = [f"calibration-{row}" for row in range(count)]
    observations = [
        Observation(ids[row], 0, range(row * context, (row + 1) * context), bench.tables[row]) for row in range(count)
    ]
    if features:
        drafter.observe(observations, features)

    def propose(batch: int, depth: int) -> None:
        requests = []
        for row in range(batch):
            text = bench.texts[row][: context + 1]
            state = SamplingState(SamplingParams(temperature=0.0), text, vocab_size=model.config.vocab_size)
            requests.append(DraftRequest(ids[row], text, bench.tables[row], depth, state))
        drafter.propose(requests).lengths.tolist()

    try:
        begin = perf_counter()
        propose(count, 1)
        cold = perf_counter() - begin
        batches = [size for size in (1, 2, 4) if size <= count]
        depths = sorted({1, (gamma + 1) // 2, gamma})
        cases = [((depth, batch), partial(propose, batch, depth)) for batch in batches for depth in depths]
        seconds = _timed(cases, budget)
    finally:
        for request_id in ids:
            drafter.release(request_id)
    curves = {}
    for depth in depths:
        known = {batch: took for (deep, batch), took in seconds.items() if deep == depth}
        if known:
            curves[depth] = Curve(list(known), list(known.values()))
    warm = seconds.get((1, count), cold)
    return curves, max(0.0, cold - warm) / (count * context)


def _timed(cases: Sequence[tuple[Case, Callable[[], object]]], budget: float) -> dict[Case, float]:
    """Least seconds of each case over passes that take turns, since what disturbs one adds; the first pass warms up.

    Cases that do not fit into the budget are left out, the first one never.
    """
    taken: dict[Case, list[float]] = {}
    start = perf_counter()
    for turn in range(PASSES + 1):
        for case, run in cases:
            if turn and case not in taken:
                continue
            if taken and perf_counter() - start > budget:
                break
            begin = perf_counter()
            run()
            seconds = perf_counter() - begin
            if turn == 1:
                taken[case].clear()
            taken.setdefault(case, []).append(seconds)
    return {case: min(each) for case, each in taken.items()}
