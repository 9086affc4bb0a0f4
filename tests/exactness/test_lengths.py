"""The joint distribution of outputs whose draft lengths adapt, and which rules would bias it.

A confidence that depends strongly on the token before it makes lengths really follow the draft. The same χ² test must
reject two rules that leak: one that lets a drawn token decide about itself, and one that compares all prefixes of a
draft, whose later confidences tell it the tokens that it cuts.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.draft.drafter import DraftRequest
from foredraft.draft.proposal import DenseProbs, DraftProposal
from foredraft.engine import adaptive
from foredraft.engine.adaptive import AdaptiveLengths
from foredraft.engine.admission import cut_lengths
from foredraft.sampling.params import SamplingParams
from foredraft.verify.block import verify_block
from foredraft.verify.token import verify_token
from foredraft.verify.verification import Verification
from tests.engine.fake import FakeModel, fake_engine
from tests.engine.test_lengths import Recorded, costs
from tests.exactness.reference import p_value
from tests.exactness.test_joint import (
    IMPOSSIBLE,
    LENGTH,
    LIKELY,
    PROMPT,
    VOCAB,
    drafter_of,
    expected_joint,
    target,
)

SYMBOLS, SLOTS, DRAWS = 3, 3, 30_000
PREDICTED = 0.75
STEPPED = np.array([1.0, 2.0, 2.2, 2.4])
"""Seconds by draft tokens: the first costs much, the others little, as where it starts a block of a kernel's rows."""

Cut = Callable[[np.ndarray, list[int]], int]


def walk(confidence: np.ndarray, tokens: list[int]) -> int:
    """Ours."""
    predicted = np.full((1, SLOTS), PREDICTED)
    return cut_lengths(confidence[None], [SLOTS], predicted, [False], 0.0, STEPPED)[0]


def all_prefixes(confidence: np.ndarray, tokens: list[int]) -> int:
    """The leak that looks harmless: the best of all prefixes by the confidences as they came out."""
    return cut_lengths(confidence[None], [SLOTS], confidence[None], [True], 0.0, STEPPED)[0]


def own_token(confidence: np.ndarray, tokens: list[int]) -> int:
    """The leak by definition: a draft ends before its first 0."""
    return next((place for place, token in enumerate(tokens) if token == 0), SLOTS)


def outputs_of(cut: Cut, rule: Callable[..., Verification], seed: int = 3) -> tuple[Counter[tuple[int, ...]], set[int]]:
    """Outputs of one drafted step, continued from the target itself to SLOTS tokens, and the lengths that occurred."""
    generator = torch.Generator().manual_seed(seed)
    p, q = tables()
    histories = torch.zeros(DRAWS, 1, dtype=torch.int64)
    drafted, rows = [], []
    for _ in range(SLOTS):
        row = q[(histories if not drafted else drafted[-1][:, None])[:, -1]]
        rows.append(row)
        drafted.append(torch.multinomial(row, 1, generator=generator)[:, 0])
    tokens = torch.stack(drafted, 1)
    before = torch.cat([histories, tokens], 1)
    confidence = np.array([0.95, 0.15, 0.95])[before[:, :-1].numpy()]  # after a 1 little is promised
    lengths = [cut(each, ids) for each, ids in zip(confidence, tokens.tolist(), strict=True)]
    proposal = DraftProposal(tokens, torch.tensor(lengths), DenseProbs(torch.stack(rows, 1)))
    accept = torch.rand(DRAWS, SLOTS, generator=generator, dtype=torch.float64)
    final = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
    result = rule(proposal, p[before], accept, final)
    outputs = []
    ends = result.num_accepted.tolist()
    for ids, accepted in zip(result.token_ids.tolist(), ends, strict=True):
        outputs.append(ids[: min(accepted + 1, SLOTS)])
    while short := [index for index, ids in enumerate(outputs) if len(ids) < SLOTS]:
        drawn = torch.multinomial(p[[outputs[index][-1] for index in short]], 1, generator=generator)[:, 0].tolist()
        for index, token in zip(short, drawn, strict=True):
            outputs[index].append(token)
    return Counter(map(tuple, outputs)), set(lengths)


def tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Target and draft distributions after each symbol [V, V]."""
    p = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.3, 0.6, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.3, 0.3], [0.5, 0.3, 0.2]], dtype=torch.float64)
    return p, q


def true_joint() -> dict[tuple[int, ...], float]:
    p, _ = tables()
    return {
        output: float(np.prod([p[before, token] for before, token in zip((0, *output), output, strict=False)]))
        for output in itertools.product(range(SYMBOLS), repeat=SLOTS)
    }


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_the_walk_leaves_the_distribution_alone(rule) -> None:
    counts, lengths = outputs_of(walk, rule)
    assert len(lengths) >= 3, "lengths hardly vary, so nothing was tested"
    assert p_value(counts, true_joint()) > LIKELY


@pytest.mark.parametrize("rule", [verify_token, verify_block])
@pytest.mark.parametrize("leak", [own_token, all_prefixes])
def test_power_a_leaking_cut_is_caught(leak: Cut, rule) -> None:
    counts, _ = outputs_of(leak, rule)
    assert p_value(counts, true_joint()) < IMPOSSIBLE


# ---- the same in the engine


class Telling:
    """A draft model with confidences that swing with the token before: odd ones promise, even ones warn."""

    method = "telling"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, num_blocks: int) -> None:
        draft = FakeModel(vocab_size=VOCAB, seed=2, sharpness=1.2, fast=True)
        self.inner = DraftModelDrafter(draft, draft.new_cache(num_blocks, 4), VOCAB)

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        proposal = self.inner.propose(requests)
        anchors = torch.tensor([[request.token_ids[-1]] for request in requests])
        before = torch.cat([anchors, proposal.token_ids], 1)[:, :-1]
        return replace(proposal, confidence=torch.where(before % 2 == 1, 0.9, 0.03))

    def num_reusable(self, block_table: Sequence[int], block_hashes: Sequence[bytes]) -> int:
        return self.inner.num_reusable(block_table, block_hashes)

    def observe(self, observations, features) -> None:
        pass

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)


def draw(verification: str, lengths: AdaptiveLengths, kind: str, num_samples: int = 3000) -> Counter[tuple[int, ...]]:
    batch = 40
    drafter = Telling(3 * batch) if kind == "telling" else drafter_of(kind, target(), 3 * batch)
    engine, factory = fake_engine(
        target(),
        drafter,
        gamma=4,
        num_blocks=3 * batch,
        max_num_seqs=batch,
        max_num_batched_tokens=10 * batch,
        verification=verification,
        lengths=lengths,
    )
    requests = []
    for seed in range(num_samples):
        params = SamplingParams(max_tokens=LENGTH, seed=seed)
        (request,) = factory.assemble({"prompt_token_ids": PROMPT}, params, None).requests
        requests.append(request)
        engine.add(request)
    while engine.scheduler.has_unfinished:
        engine.step()
    assert sum(engine.stats.steps_per_draft_length[1:]) > 0.1 * num_samples, "hardly anything was drafted"
    return Counter(tuple(request.output_token_ids) for request in requests)


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_lengths_by_confidence_in_the_engine(verification: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Uncorrected, however wrong the confidences are: the distribution must not need them to be right.
    monkeypatch.setattr(adaptive, "CALIBRATION_RATE", 0.0)
    seen = Recorded()
    lengths = AdaptiveLengths(costs(lambda tokens: 1 + 0.0015 * tokens, per_draft=0.0), explain=seen)
    counts = draw(verification, lengths, "telling")
    cut = [
        part
        for plan, _ in seen.steps
        for part, whole in zip(plan.verified, plan.drafted, strict=True)
        if 0 < whole != part
    ]
    assert len(cut) > 200
    assert p_value(counts, expected_joint(SamplingParams())) > LIKELY


@pytest.mark.parametrize(
    ("kind", "verification"), [("draft_model", "block"), ("draft_model_tree", "token"), ("ngram", "token")]
)
def test_lengths_by_running_rates_in_the_engine(kind: str, verification: str) -> None:
    lengths = AdaptiveLengths(
        costs(lambda tokens: 1 + 0.001 * tokens, per_draft=0.0), tree_width=2 if kind.endswith("tree") else 1
    )
    counts = draw(verification, lengths, kind)
    assert p_value(counts, expected_joint(SamplingParams())) > LIKELY
