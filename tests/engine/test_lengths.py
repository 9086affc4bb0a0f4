"""Draft-length control in the engine, against targets, drafters and costs that are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.engine.fake import FakeModel, OracleDrafter, fake_engine, run

from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.draft.drafter import DraftRequest
from foredraft.draft.ngram import NgramDrafter
from foredraft.draft.proposal import DraftProposal
from foredraft.engine import adaptive
from foredraft.engine.adaptive import REST, AdaptiveLengths, StepPlan
from foredraft.engine.costs import CostCurve, Curve
from foredraft.engine.lengths import Draftable, FixedLengths, StepOutcome
from foredraft.sampling.params import SamplingParams


class Known(CostCurve):
    """Costs that live timings do not change: a fake model's own times say nothing."""

    def refresh(self, **timings) -> None:
        pass

    def refresh_drafting(self, *timings) -> None:
        pass


def costs(
    step: Callable[[int], float] = lambda tokens: 1 + 0.05 * tokens,
    per_draft: float = 0.05,
    catch_up: float = 0.0,
    largest: int = 200,
) -> CostCurve:
    """Seconds of a step by its tokens, of each drafted position, and of each token of catch-up."""
    sizes = list(range(1, largest + 1))
    drafts = {depth: Curve([1], [depth * per_draft]) for depth in range(1, 9)} if per_draft else {}
    return Known(Curve(sizes, [step(size) for size in sizes]), drafts, catch_up)


class Recorded:
    """Collects what `AdaptiveLengths` explains."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepPlan, StepOutcome]] = []

    def __call__(self, plan: StepPlan, outcome: StepOutcome) -> None:
        self.steps.append((plan, outcome))

    def lengths_of(self, request: int = 0) -> list[int]:
        """Verified lengths of one request, where it had room for all."""
        return [
            plan.verified[request] if plan.verified else 0
            for plan, _ in self.steps
            if len(plan.requests) > request and plan.requests[request].room
        ]


class Switching(OracleDrafter):
    """An oracle whose drafts are all wrong while `wrong` says so of the text's length."""

    def __init__(self, model: FakeModel, wrong: Callable[[int], bool]) -> None:
        super().__init__(model)
        self.wrong = wrong
        self.num_drafted: list[int] = []

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        self.num_drafted.append(sum(request.max_draft_tokens > 0 for request in requests))
        drafts = []
        for request in requests:
            draft = self.model.greedy(request.token_ids, request.max_draft_tokens)
            if self.wrong(len(request.token_ids)):
                draft = [(token + 1) % self.model.config.vocab_size for token in draft]
            drafts.append(draft)
        return DraftProposal.deterministic(drafts)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def model_of(max_model_len: int = 2048) -> FakeModel:
    return FakeModel(max_model_len=max_model_len)


def adaptive_run(drafter, model: FakeModel, curve: CostCurve, max_tokens: int = 300, prompts: int = 1, gamma: int = 6):
    seen = Recorded()
    engine, factory = fake_engine(
        model,
        drafter,
        gamma=gamma,
        num_blocks=prompts * (max_tokens // 4 + 16),
        max_num_seqs=prompts,
        max_num_batched_tokens=1024,
        lengths=AdaptiveLengths(curve, explain=seen),
    )
    listed = [[1 + number % 10, 2, 3, number % 7] for number in range(prompts)]
    outputs = run(engine, factory, listed, greedy(max_tokens))
    for prompt, output in zip(listed, outputs, strict=True):
        assert output.outputs[0].token_ids == model.greedy(prompt, max_tokens)
    return engine, seen


def test_an_oracle_gets_long_drafts() -> None:
    model = model_of()
    engine, seen = adaptive_run(OracleDrafter(model), model, costs())
    lengths = seen.lengths_of()
    assert lengths[10:-1] == [6] * len(lengths[10:-1])
    assert engine.stats.mean_acceptance_length > 6


def test_a_wrong_drafter_is_parked_and_tried_now_and_then() -> None:
    model = model_of()
    drafter = Switching(model, lambda length: True)
    engine, seen = adaptive_run(drafter, model, costs(), max_tokens=1500)
    lengths = seen.lengths_of()
    tried = sum(length > 0 for length in lengths[30:])
    assert 0 < tried < 0.03 * len(lengths)
    plain = 1500 * (1 + 0.05)
    spent = sum(1 + 0.05 * (1 + length) + 0.05 * length for length in lengths)
    assert spent < 1.02 * plain
    assert engine.stats.steps_per_draft_length[0] > 0.95 * len(lengths)


def test_nothing_is_weighed_while_all_are_parked_until_the_batch_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that does not draft pays for a decision only now and then; a request that comes is decided at once."""
    weighed: list[int] = []
    best = adaptive.best_lengths
    monkeypatch.setattr(adaptive, "best_lengths", lambda *given: weighed.append(policy._number) or best(*given))
    policy = AdaptiveLengths(costs(step=lambda tokens: tokens**2))  # two tokens cost as four steps of one

    def choose(*ids: str) -> list[int]:
        lengths = policy.choose([Draftable(each, 4, 10, 100, True) for each in ids], 0)
        policy.learn(StepOutcome([0] * len(ids), len(ids), len(ids), 1.0, 0.0))
        return lengths

    assert [choose("a", "b") for _ in range(REST + 1)] == [[0, 0]] * (REST + 1)
    assert sorted(set(weighed)) == [1, REST + 1]
    choose("a", "b", "c")
    assert weighed[-1] == REST + 2
    choose("a")
    assert weighed[-1] == REST + 3


def test_a_change_for_the_better_is_noticed() -> None:
    model = model_of()
    drafter = Switching(model, lambda length: length < 600)
    _, seen = adaptive_run(drafter, model, costs(), max_tokens=1800)
    lengths = seen.lengths_of()
    assert np.mean(lengths[200:500]) < 0.2
    assert np.mean(lengths[-20:-2]) > 5


def test_a_change_for_the_worse_is_noticed() -> None:
    model = model_of()
    drafter = Switching(model, lambda length: length > 600)
    _, seen = adaptive_run(drafter, model, costs(), max_tokens=1200)
    lengths = seen.lengths_of()
    assert np.mean(lengths[20:60]) > 5
    assert np.mean(lengths[-300:]) < 0.2


def test_a_parked_request_does_not_flap() -> None:
    """Drafts right half of the time, at a cost where that just does not pay."""
    model = model_of()
    generator = random.Random(4)
    coin = {length: generator.random() < 0.5 for length in range(3000)}
    drafter = Switching(model, lambda length: coin[length])
    _, seen = adaptive_run(drafter, model, costs(lambda tokens: 1 + 0.45 * (tokens - 1)), max_tokens=1500, gamma=1)
    switched_on = sum(
        plan.trial is None and plan.chosen[0] > 0 and before.chosen[0] == 0
        for (before, _), (plan, _) in zip(seen.steps, seen.steps[1:], strict=False)
    )
    assert switched_on < 0.03 * len(seen.steps)


def test_good_and_bad_requests_of_one_batch_are_told_apart() -> None:
    model = model_of()

    class Half(Switching):
        def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
            wrong = [request.token_ids[0] % 2 == 0 for request in requests]
            drafts = [model.greedy(request.token_ids, request.max_draft_tokens) for request in requests]
            return DraftProposal.deterministic(
                [[(token + bad) % 11 for token in draft] for draft, bad in zip(drafts, wrong, strict=True)]
            )

    _, seen = adaptive_run(Half(model, bool), model, costs(), prompts=6, max_tokens=200)
    late = [plan for plan, _ in seen.steps if len(plan.requests) == 6][15:]
    for row in range(6):
        mean = np.mean([plan.verified[row] if plan.verified else 0 for plan in late])
        first_token = 1 + row
        assert (mean > 4) if first_token % 2 else (mean < 1)


@pytest.mark.parametrize("prompts", [1, 4, 16])
def test_a_steep_curve_shrinks_lengths(prompts: int) -> None:
    """As where every token wakes more experts."""
    model = model_of()
    means = []
    for slope in (0.0, 0.2, 1.0, 20.0):
        _, seen = adaptive_run(
            OracleDrafter(model, wrong_every=4),
            model,
            costs(lambda tokens, slope=slope: 1 + slope * tokens, per_draft=0.01),
            prompts=prompts,
            max_tokens=120,
        )
        means.append(np.mean([length for row in range(prompts) for length in seen.lengths_of(row)[8:]]))
    assert means == sorted(means, reverse=True)
    assert means[0] > means[2] + 1
    assert means[-1] < 0.3


def test_many_requests_get_shorter_drafts_than_one() -> None:
    """A forward that is free up to eight tokens and linear past them."""
    model = model_of()
    means = {}
    for prompts in (1, 2, 8):
        drafter = OracleDrafter(model, wrong_every=3)
        _, seen = adaptive_run(
            drafter, model, costs(lambda tokens: 1 + 0.4 * max(0, tokens - 8)), prompts=prompts, max_tokens=120
        )
        means[prompts] = np.mean([length for row in range(prompts) for length in seen.lengths_of(row)[8:]])
    assert means[1] > means[2] > means[8]


def test_catching_up_must_pay() -> None:
    model = model_of()
    for catch_up, drafts in ((0.0, True), (0.001, True), (5.0, False)):
        drafter = Switching(model, lambda length: False)
        engine, factory = fake_engine(
            model,
            drafter,
            num_blocks=400,
            max_num_batched_tokens=1024,
            lengths=AdaptiveLengths(costs(catch_up=catch_up)),
        )
        prompt = [(7 * place) % 11 for place in range(400)]
        run(engine, factory, [prompt], greedy(60))
        assert (engine.stats.num_draft_tokens > 0) == drafts


def test_lengths_leave_greedy_and_seeded_tokens_alone() -> None:
    model = FakeModel(sharpness=1.0)
    params = [
        SamplingParams(temperature=1.0, max_tokens=40, seed=11),
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.7, top_p=0.9, max_tokens=40, seed=5),
    ]
    prompts = [[1, 2, 3], [4, 5], [6]]
    plain, factory = fake_engine(model, None)
    expected = [each.outputs[0].token_ids for each in run(plain, factory, prompts, params)]
    shapes = [lambda tokens: 1.0, lambda tokens: 1 + 0.3 * tokens, lambda tokens: 1 + 0.7 * -(-tokens // 4)]
    drawn = FakeModel(sharpness=1.0, seed=3)
    seen = set()
    for shape in shapes:
        for make in (
            lambda: OracleDrafter(model, 3),
            lambda: NgramDrafter(1, 3),
            lambda: DraftModelDrafter(drawn, drawn.new_cache(64, 4), 11),
        ):
            for policy in (FixedLengths(), AdaptiveLengths(costs(shape))):
                engine, factory = fake_engine(model, make(), gamma=5, lengths=policy)
                outputs = run(engine, factory, prompts, params)
                assert [each.outputs[0].token_ids for each in outputs] == expected
                assert engine.stats.num_draft_tokens > 0
                seen.add(tuple(engine.stats.steps_per_draft_length))
    assert len(seen) > 6, "all runs drafted alike, so nothing was compared"


def test_a_drafter_is_as_good_after_a_parked_stretch_as_before() -> None:
    """The draft model is the target: whatever it missed while parked, it must be accepted in full after it."""
    model = FakeModel(max_model_len=512)
    same = FakeModel(max_model_len=512)
    curve = costs()
    policy = AdaptiveLengths(curve)
    engine, factory = fake_engine(
        model, DraftModelDrafter(same, same.new_cache(200, 4), 11), num_blocks=200, lengths=policy
    )
    assembled = factory.assemble({"prompt_token_ids": [1, 2, 3]}, greedy(300), None)
    request = assembled.requests[0]
    engine.add(request)
    cheap, dear = curve.target, Curve([1, 2], [1.0, 50.0])
    while not request.finished:
        curve.target = dear if 80 < request.num_output_tokens < 160 else cheap
        engine.step()
    assert request.output_token_ids == model.greedy([1, 2, 3], 300)
    assert request.stats.acceptance_rate == 1.0
    lengths = request.stats.steps_per_draft_length
    assert lengths[0] > 60
    assert lengths[4] > 30


def test_what_was_expected_is_what_comes_on_average() -> None:
    model = model_of()
    _, seen = adaptive_run(OracleDrafter(model, wrong_every=4), model, costs(), prompts=4, max_tokens=200)
    steps = [(plan, outcome) for plan, outcome in seen.steps if plan.verified and len(plan.requests) == 4][10:]
    expected = sum(plan.expected_tokens for plan, _ in steps)
    came = sum(outcome.num_emitted for _, outcome in steps)
    assert expected == pytest.approx(came, rel=0.15)


def test_confidences_are_corrected_by_what_becomes_of_them() -> None:
    model = model_of()

    class Overconfident(OracleDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
            proposal = super().propose(requests)
            return replace(proposal, confidence=torch.full(proposal.token_ids.shape, 0.97))

    _, seen = adaptive_run(
        Overconfident(model, wrong_every=2), model, costs(lambda tokens: 1 + 0.1 * tokens), max_tokens=900
    )
    plans = [plan for plan, _ in seen.steps if plan.conditional.shape[1] > 1]
    # Every second token is wrong, and a step ends with it: a draft's first token is right, its second one wrong.
    assert plans[0].conditional[0, :2] == pytest.approx([0.97, 0.97])
    assert plans[-1].conditional[0, 0] > 0.97
    assert plans[-1].conditional[0, 1] < 0.9
