"""The rules' exact output distributions, with every draw integrated out, not sampled.

The engine's own rule functions are called on every draft of two tokens over a small vocabulary, and each decision's
probability is read off by bisection on its draw. So even faults whose total variation is below 0.01, such as the token
residual in place of the block residual, are seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

from foredraft.draft.proposal import DenseProbs, DraftProposal
from foredraft.verify import ratio
from foredraft.verify.block import verify_block
from foredraft.verify.token import verify_token

GAMMA, VOCAB = 2, 3
Rule = Callable[..., object]


class Pair:
    """A random target and draft: p(·|prefix), q(·|prefix) for prefixes up to γ tokens, as float64 arrays."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        prefixes = [prefix for n in range(GAMMA + 2) for prefix in itertools.product(range(VOCAB), repeat=n)]
        self.p = {prefix: generator.dirichlet(np.full(VOCAB, 0.7)) for prefix in prefixes}
        self.q = {prefix: generator.dirichlet(np.full(VOCAB, 0.7)) for prefix in prefixes}

    def proposal(self, draft: tuple[int, ...]) -> tuple[DraftProposal, torch.Tensor]:
        q = torch.tensor(np.stack([self.q[draft[:k]] for k in range(GAMMA)]))[None]
        p = torch.tensor(np.stack([self.p[draft[:k]] for k in range(GAMMA + 1)]))[None]
        return DraftProposal(torch.tensor([draft]), torch.tensor([GAMMA]), DenseProbs(q)), p


def accept_thresholds(rule: Rule, proposal: DraftProposal, p: torch.Tensor) -> list[float]:
    """For each position, the draw below which it counts as passed, found by bisection on the rule itself.

    Position k is looked at alone: the draws before it pass (for the token rule they must) and those after it fail.
    """
    thresholds = []
    for k in range(GAMMA):
        low, high = 0.0, 1.0
        for _ in range(50):
            middle = (low + high) / 2
            draws = torch.full((1, GAMMA), 1 - 1e-15, dtype=torch.float64)
            draws[0, :k] = 1e-15
            draws[0, k] = middle
            passed = int(rule(proposal, p, draws, torch.tensor([0.5])).num_accepted[0]) > k
            low, high = (middle, high) if passed else (low, middle)
        thresholds.append(low)
    return thresholds


def final_distribution(rule: Rule, proposal: DraftProposal, p: torch.Tensor, length: int) -> np.ndarray:
    """The final token's distribution after `length` accepted tokens, by bisection on the final draw."""
    draws = torch.full((1, GAMMA), 1 - 1e-15, dtype=torch.float64)
    draws[0, :length] = 1e-15
    # One call with a fine grid of final draws; edges are then sharpened by bisection.
    edges = [0.0]
    for token in range(VOCAB - 1):
        low, high = edges[-1], 1.0
        for _ in range(50):
            middle = (low + high) / 2
            result = rule(proposal, p, draws, torch.tensor([middle], dtype=torch.float64))
            assert int(result.num_accepted[0]) == length
            low, high = (middle, high) if int(result.token_ids[0, length]) <= token else (low, middle)
        edges.append(low)
    return np.diff([*edges, 1.0])


def lengths_distribution(thresholds: list[float], block: bool) -> list[float]:
    """P(accepted length) from independent passes: the longest passing one (block) or up to the first failure."""
    result = [0.0] * (GAMMA + 1)
    for passes in itertools.product([True, False], repeat=GAMMA):
        probability = np.prod([t if ok else 1 - t for t, ok in zip(thresholds, passes, strict=True)])
        if block:
            length = max((k + 1 for k in range(GAMMA) if passes[k]), default=0)
        else:
            length = next((k for k in range(GAMMA) if not passes[k]), GAMMA)
        result[length] += float(probability)
    return result


def output_joint(rule: Rule, pair: Pair, block: bool) -> tuple[dict[tuple[int, ...], float], float]:
    """The joint of the first γ+1 tokens when what is not emitted in this step is continued from p; and E[accepted]."""
    joint = dict.fromkeys(itertools.product(range(VOCAB), repeat=GAMMA + 1), 0.0)
    expected = 0.0
    for draft in itertools.product(range(VOCAB), repeat=GAMMA):
        weight = float(np.prod([pair.q[draft[:k]][draft[k]] for k in range(GAMMA)]))
        proposal, p = pair.proposal(draft)
        lengths = lengths_distribution(accept_thresholds(rule, proposal, p), block)
        for length, probability in enumerate(lengths):
            if probability < 1e-12:
                continue
            expected += weight * probability * length
            final = final_distribution(rule, proposal, p, length)
            for token in range(VOCAB):
                emitted = (*draft[:length], token)
                for rest in itertools.product(range(VOCAB), repeat=GAMMA - length):
                    output = emitted + rest
                    tail = float(np.prod([pair.p[output[:k]][output[k]] for k in range(length + 1, GAMMA + 1)]))
                    joint[output] += weight * probability * final[token] * tail
    return joint, expected


def distance(pair: Pair, joint: dict[tuple[int, ...], float]) -> float:
    """Total variation from the target's own joint."""
    total = 0.0
    for output, probability in joint.items():
        total += abs(probability - float(np.prod([pair.p[output[:k]][output[k]] for k in range(GAMMA + 1)])))
    return total / 2


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("rule", "block"), [(verify_token, False), (verify_block, True)])
def test_the_output_is_the_targets_to_nine_digits(rule: Rule, block: bool, seed: int) -> None:
    pair = Pair(seed)
    joint, _ = output_joint(rule, pair, block)
    assert distance(pair, joint) < 1e-9


def test_power_the_token_residual_in_the_block_rule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import foredraft.verify.block as module

    def unweighted(proposal, target_probs, num_accepted, weight, final):
        return ratio.emitted(proposal, target_probs, num_accepted, torch.ones_like(weight), final)

    monkeypatch.setattr(module, "emitted", unweighted)
    distances = [distance(pair, output_joint(verify_block, pair, True)[0]) for pair in map(Pair, range(3))]
    assert max(distances) > 1e-4
    assert max(distances) < 0.1  # small: counting samples would hardly have shown it


def test_power_an_uncapped_ratio_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import foredraft.verify.block as module

    monkeypatch.setattr(module, "draft_probs_at_tokens", lambda proposal: ratio.draft_probs_at_tokens(proposal) * 0.7)
    distances = [distance(pair, output_joint(verify_block, pair, True)[0]) for pair in map(Pair, range(2))]
    assert max(distances) > 1e-2


def expected_accepted(pair: Pair, block: bool) -> float:
    """E[accepted] by the formulas of Leviathan et al. and Sun et al., without the engine's code."""
    total = 0.0
    for draft in itertools.product(range(VOCAB), repeat=GAMMA):
        p = [pair.p[draft[:k]] for k in range(GAMMA + 1)]
        q = [pair.q[draft[:k]] for k in range(GAMMA)]
        weight = float(np.prod([q[k][draft[k]] for k in range(GAMMA)]))
        if block:
            w = [1.0]
            for k in range(GAMMA):
                w.append(min(1.0, w[-1] * p[k][draft[k]] / q[k][draft[k]]))
            h = []
            for k in range(1, GAMMA):
                s = float(np.maximum(w[k] * p[k] - q[k], 0).sum())
                h.append(s / (s + 1 - w[k]) if s + 1 - w[k] > 0 else 1.0)
            thresholds = [*h, w[GAMMA]]
        else:
            thresholds = [min(1.0, p[k][draft[k]] / q[k][draft[k]]) for k in range(GAMMA)]
        total += weight * sum(n * mass for n, mass in enumerate(lengths_distribution(thresholds, block)))
    return total


def test_block_never_accepts_fewer_than_token_over_200_pairs() -> None:
    gains = []
    for seed in range(200):
        pair = Pair(seed)
        gains.append(expected_accepted(pair, True) - expected_accepted(pair, False))
    assert min(gains) > -1e-12
    assert np.mean(gains) > 0.005


@pytest.mark.parametrize(("rule", "block"), [(verify_token, False), (verify_block, True)])
def test_the_rules_accept_as_many_as_the_formulas_say(rule: Rule, block: bool) -> None:
    for seed in range(3):
        pair = Pair(seed)
        assert output_joint(rule, pair, block)[1] == pytest.approx(expected_accepted(pair, block), abs=1e-9)
