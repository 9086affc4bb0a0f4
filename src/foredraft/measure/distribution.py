"""Whether sampled outputs follow the target's distribution, for vocabularies too large to count.

Randomised probability-integral transform (Rosenblatt 1952; Smith 1985 for discrete values): a token drawn from p gives
u = P(tokens before it in a fixed order) + U·p(token), which is uniform on (0, 1) and independent from token to token. A
Kolmogorov-Smirnov test then needs no cell counts at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from foredraft.kv.pool import blocks_for
from foredraft.measure.forward import BLOCK_SIZE, sequence_batch
from foredraft.models.decoder import TargetModel
from foredraft.sampling.noise import Stream, uniforms
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState
from foredraft.sampling.transform import process_logits

AUDIT_STREAM = Stream.FINAL
_AUDIT_SEED = 0x5EED


def target_probs(
    model: TargetModel, prompt_ids: Sequence[int], output_ids: Sequence[int], params: SamplingParams, eos: Sequence[int]
) -> Tensor:
    """The target's distribution at each output token, from one forward over prompt and output; [n, V] float64."""
    ids = [*prompt_ids, *output_ids[:-1]]
    cache = model.new_cache(blocks_for(len(ids), BLOCK_SIZE), BLOCK_SIZE)
    logits = model.forward(sequence_batch(ids, 0, len(output_ids), model.device), cache).logits
    state = SamplingState(params, prompt_ids, vocab_size=model.config.vocab_size, eos_token_ids=eos)
    return process_logits(logits, [state], [list(output_ids[:-1])]).double().softmax(-1)


def transformed(probs: Tensor, tokens: Sequence[int], draws: Tensor, *, by_probability: bool) -> Tensor:
    """Values u [n] of `tokens` [n] under `probs` [n, V], with `draws` [n] in (0, 1).

    Args:
        by_probability: orders tokens from the most to the least probable, which shows a sharper or flatter
            distribution; otherwise by id, which shows what favours some tokens.
    """
    chosen = torch.tensor(list(tokens), device=probs.device)[:, None]
    own = probs.gather(-1, chosen)
    before = probs > own if by_probability else torch.arange(probs.shape[-1], device=probs.device) < chosen
    ties = (probs == own) & (torch.arange(probs.shape[-1], device=probs.device) < chosen) if by_probability else None
    mass = (probs * before).sum(-1) + ((probs * ties).sum(-1) if ties is not None else 0.0)
    return mass + draws.to(probs) * own[:, 0]


def surprisals(probs: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How much more surprising than expected each token was, -log p(token) - H(p), and the variance of that; [n] each.

    Under p the first has mean 0 whatever was drawn before, so a sum of many is normal. It adds up over positions with
    unlike distributions, where a deviation in the order of tokens cancels out.
    """
    logs = probs.clamp(min=torch.finfo(probs.dtype).tiny).log()
    entropy = -(probs * logs).sum(-1)
    variance = (probs * logs.square()).sum(-1) - entropy.square()
    chosen = torch.tensor(list(tokens), device=probs.device)[:, None]
    return -logs.gather(-1, chosen)[:, 0] - entropy, variance.clamp(min=0)


def normal_p_value(deviation: float, variance: float) -> float:
    """Two-sided p-value of a sum's `deviation` from its mean, given its variance; 1 when it cannot vary."""
    return float(2 * stats.norm.sf(abs(deviation) / math.sqrt(variance))) if variance > 0 else 1.0


def audit_draws(request: int, count: int) -> Tensor:
    """Draws of the audit's own, independent of those that sampled."""
    return uniforms([_AUDIT_SEED + request] * count, list(range(count)), AUDIT_STREAM)


def uniform_p_value(values: Sequence[float]) -> float:
    """p-value of a Kolmogorov-Smirnov test of `values` against the uniform distribution on (0, 1)."""
    return float(stats.kstest(np.asarray(values), "uniform").pvalue) if values else 1.0


def counts_p_value(
    counts: Mapping[tuple[int, ...], int], expected: Mapping[tuple[int, ...], float]
) -> tuple[float, int]:
    """p-value of a χ² test of counted outputs against expected probabilities, and its cells.

    What is not in `expected` makes up one more cell; expectations below 5 join it.
    """
    total = sum(counts.values())
    frequent = {output: mass for output, mass in expected.items() if mass * total >= 5}
    seen = [counts.get(output, 0) for output in frequent]
    mean = [mass * total for mass in frequent.values()]
    rest_seen, rest_mean = total - sum(seen), total - sum(mean)
    if rest_mean >= 5:
        seen.append(rest_seen)
        mean.append(rest_mean)
    if len(seen) < 2:
        return 1.0, len(seen)
    statistic = sum((a - b) ** 2 / b for a, b in zip(seen, mean, strict=True))
    # Without a cell for the rest the counts are not bound to add up, so no degree of freedom is lost.
    freedom = len(seen) - 1 if rest_mean >= 5 else len(seen)
    return float(stats.chi2.sf(statistic, freedom)), len(seen)
