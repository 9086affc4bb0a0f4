"""The target's distribution by its definition, in plain numpy, one row at a time: written apart from the engine's own
transforms, so that both would have to be wrong alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from foredraft.sampling.params import SamplingParams

Logits = Callable[[Sequence[int]], np.ndarray]


def distribution(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    allowed: Callable[[Sequence[int]], set[int]] | None = None,
) -> np.ndarray:
    """The distribution of the token after `prompt + output`, [V]."""
    x = np.array(logits, dtype=np.float64)
    size = len(x)
    for token in range(size):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
        if allowed is not None and token not in allowed(output):
            x[token] = -math.inf
    for word in bad_words:
        if len(word) == 1 or list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
            x[word[-1]] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if len(output) < params.min_tokens:
        for token in [*eos, *(params.stop_token_ids or ())]:
            x[token] = -math.inf
    for token in range(size):
        if params.repetition_penalty != 1 and token in [*prompt, *output]:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        count = list(output).count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if params.temperature == 0:
        return np.eye(size)[int(np.argmax(x))]
    x = x / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < size:
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = sorted(range(size), key=lambda token: (-p[token], token))
    mass = 0.0
    for place, token in enumerate(order):
        if place > 0 and mass >= params.top_p and params.top_p < 1:
            p[token] = 0
        else:
            mass += p[token]
    return p / p.sum()


def joint(
    next_distribution: Callable[[tuple[int, ...]], np.ndarray], size: int, length: int
) -> dict[tuple[int, ...], float]:
    """The probability of every output of `length` tokens."""
    result = {}
    for output in itertools.product(range(size), repeat=length):
        probability = 1.0
        for step, token in enumerate(output):
            probability *= next_distribution(output[:step])[token]
            if probability == 0:
                break
        if probability > 0:
            result[output] = probability
    return result


def p_value(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """Of the χ² test of `counts` against `expected` probabilities; cells expected fewer than 5 times are pooled.

    0 when something came that cannot come.
    """
    total = sum(counts.values())
    if any(output not in expected for output in counts):
        return 0.0
    cells, pooled_seen, pooled_expected = [], 0.0, 0.0
    for output, probability in expected.items():
        if probability * total < 5:
            pooled_seen += counts.get(output, 0)
            pooled_expected += probability * total
        else:
            cells.append((counts.get(output, 0), probability * total))
    if pooled_expected >= 5:
        cells.append((pooled_seen, pooled_expected))
    if len(cells) < 2:
        return 1.0
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    return float(stats.chi2.sf(statistic, len(cells) - 1))
