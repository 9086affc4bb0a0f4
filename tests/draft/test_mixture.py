"""The mixture: it finds the better drafter, request by request, and reports each one's own q."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.engine.fake import FakeModel, OracleDrafter, fake_engine, run
from tests.exactness.reference import p_value
from tests.exactness.test_joint import LENGTH, LIKELY, PROMPT, drafter_of, expected_joint, target
from torch import Tensor

from foredraft.draft import mixture as mixture_module
from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.merging import merged
from foredraft.draft.mixture import MixtureDrafter
from foredraft.draft.ngram import NgramDrafter
from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.sampling.params import SamplingParams


@pytest.fixture(autouse=True)
def _even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting takes one second, and so does the rest of a step; fakes' own times say nothing."""
    monkeypatch.setattr(mixture_module, "perf_counter", itertools.count().__next__)


class Watched:
    """A drafter whose drafted requests are counted; it has drafts only for texts that `speaks` says."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, inner, name: str, speaks=lambda tokens: True) -> None:
        self.inner, self.method, self.speaks = inner, name, speaks
        self.num_drafted = 0
        self.seen: list[Tensor] = []

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        silent = [not self.speaks(request.token_ids) for request in requests]
        self.num_drafted += len(requests) - sum(silent)
        asked = [
            replace(request, max_draft_tokens=0) if quiet else request
            for request, quiet in zip(requests, silent, strict=True)
        ]
        return self.inner.propose(asked)

    def observe(self, observations, features) -> None:
        self.seen += features

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)


def mixture_run(arms, model: FakeModel, max_tokens: int = 300, prompts: int = 1):
    mixture = MixtureDrafter([(arm, 4) for arm in arms])
    engine, factory = fake_engine(model, mixture, gamma=4, num_blocks=prompts * 320)
    listed = [[1 + number, 2, 3] for number in range(prompts)]
    outputs = run(engine, factory, listed, SamplingParams(temperature=0.0, max_tokens=max_tokens))
    for prompt, output in zip(listed, outputs, strict=True):
        assert output.outputs[0].token_ids == model.greedy(prompt, max_tokens)
    assert mixture._drafted == {}
    return engine, mixture


@pytest.mark.parametrize("right_first", [True, False])
def test_the_better_drafter_is_found_and_the_other_left_alone(right_first: bool) -> None:
    model = FakeModel(max_model_len=2048)
    right, wrong = Watched(OracleDrafter(model), "right"), Watched(OracleDrafter(model, wrong_every=1), "wrong")
    engine, mixture = mixture_run([right, wrong] if right_first else [wrong, right], model, max_tokens=1000)
    assert wrong.num_drafted < 0.08 * right.num_drafted
    assert engine.stats.mean_acceptance_length > 4.4
    assert sum(mixture.num_drafts) >= engine.stats.num_steps - 2


def test_where_the_best_has_nothing_the_next_best_drafts() -> None:
    model = FakeModel(max_model_len=2048)
    best = Watched(OracleDrafter(model), "best", speaks=lambda tokens: len(tokens) % 3 == 0)
    other = Watched(OracleDrafter(model, wrong_every=4), "other")
    mixture_run([best, other], model)
    assert best.num_drafted > 10
    assert other.num_drafted > 10


def test_requests_of_one_batch_have_drafters_of_their_own() -> None:
    model = FakeModel(max_model_len=2048)
    odd = Watched(OracleDrafter(model), "odd", speaks=lambda tokens: tokens[0] % 2 == 1)
    even = Watched(OracleDrafter(model), "even", speaks=lambda tokens: tokens[0] % 2 == 0)
    engine, _ = mixture_run([odd, even], model, max_tokens=60, prompts=4)
    assert engine.stats.mean_acceptance_length > 4
    assert odd.num_drafted > 10
    assert even.num_drafted > 10


def test_a_change_is_noticed() -> None:
    model = FakeModel(max_model_len=4096)

    class Ageing(OracleDrafter):
        def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
            self.wrong_every = 1 if len(requests[0].token_ids) > 400 else 0
            return super().propose(requests)

    ageing, steady = Watched(Ageing(model), "ageing"), Watched(OracleDrafter(model, wrong_every=3), "steady")
    before = 0

    class Marked(Watched):
        def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
            nonlocal before
            if len(requests[0].token_ids) < 400:
                before = self.num_drafted
            return super().propose(requests)

    steady = Marked(OracleDrafter(model, wrong_every=3), "steady")
    mixture_run([ageing, steady], model, max_tokens=1200)
    assert steady.num_drafted - before > 5 * before


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_the_distribution_is_the_targets(verification: str) -> None:
    batch, count = 40, 3000
    mixture = MixtureDrafter(
        [(drafter_of(kind, target(), 3 * batch), 4) for kind in ("ngram", "draft_model", "adversary")]
    )
    engine, factory = fake_engine(
        target(),
        mixture,
        num_blocks=3 * batch,
        max_num_seqs=batch,
        max_num_batched_tokens=400,
        verification=verification,
    )
    requests = []
    for seed in range(count):
        params = SamplingParams(max_tokens=LENGTH, seed=seed)
        requests += factory.assemble({"prompt_token_ids": PROMPT}, params, None).requests
        engine.add(requests[-1])
    while engine.scheduler.has_unfinished:
        engine.step()
    assert min(mixture.num_drafts) > 0
    assert sum(drafts > 50 for drafts in mixture.num_drafts) >= 2
    counts = Counter(tuple(request.output_token_ids) for request in requests)
    assert p_value(counts, expected_joint(SamplingParams())) > LIKELY


def test_confidences_are_what_became_of_earlier_drafts() -> None:
    model = FakeModel(max_model_len=2048)
    proposals: list[DraftProposal] = []
    mixture = MixtureDrafter([(OracleDrafter(model), 4), (NgramDrafter(3, 4), 4)])
    propose = mixture.propose
    mixture.propose = lambda requests: proposals.append(propose(requests)) or proposals[-1]
    engine, factory = fake_engine(model, mixture, gamma=4, num_blocks=120)
    run(engine, factory, [[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=250))
    confidence = [each.confidence[0, 0] for each in proposals if int(each.lengths[0]) == 4]
    assert float(confidence[0]) < 0.8
    assert float(confidence[-1]) > 0.95


def test_each_drafter_observes_its_own_layers() -> None:
    model = FakeModel()
    low, high = Watched(OracleDrafter(model), "low"), Watched(OracleDrafter(model), "high")
    low.feature_layers, high.feature_layers = (1, 3), (5, 1)
    mixture = MixtureDrafter([(low, 4), (high, 4)])
    assert mixture.feature_layers == (1, 3, 5)
    layers = tuple(torch.full((2, 1), float(layer)) for layer in mixture.feature_layers)
    mixture.observe([Observation("a", 0, range(2), [0])], layers)
    assert [float(layer[0]) for layer in low.seen] == [1, 3]
    assert [float(layer[0]) for layer in high.seen] == [5, 1]


def test_merging_keeps_every_row_and_its_distribution() -> None:
    dense = DraftProposal(
        torch.tensor([[2, 1]]), torch.tensor([2]), DenseProbs(torch.tensor([[[0.1, 0.2, 0.7], [0.5, 0.5, 0.0]]]))
    )
    sparse = DraftProposal(
        torch.tensor([[1], [0]]),
        torch.tensor([1, 1]),
        SparseProbs(torch.tensor([[[1, 2]], [[0, 1]]]), torch.tensor([[[0.6, 0.4]], [[1.0, 0.0]]])),
    )
    hot = DraftProposal.deterministic([[2, 0]])
    whole = merged([([2], dense), ([3, 0], sparse)], 4, "cpu")
    assert whole.lengths.tolist() == [1, 0, 2, 1]
    assert whole.token_ids.tolist() == [[0, 0], [0, 0], [2, 1], [1, 0]]
    assert isinstance(whole.probs, DenseProbs)
    assert torch.equal(whole.probs.probs[2], dense.probs.probs[0])
    assert whole.probs.probs[3, 0].tolist() == pytest.approx([0, 0.6, 0.4])
    assert whole.probs.probs[0, 0].tolist() == [1, 0, 0]
    assert whole.confidence is None
    both = merged([([1], hot), ([0, 2], sparse)], 3, "cpu")
    assert isinstance(both.probs, SparseProbs)
    assert both.probs.candidates[1].tolist() == [[2, 0], [0, 0]]
    assert both.probs.probs[1].tolist() == [[1, 0], [1, 0]]
    assert merged([], 2, "cpu").lengths.tolist() == [0, 0]


def test_a_draft_model_in_a_mixture_catches_up() -> None:
    model = FakeModel(max_model_len=2048)
    same = FakeModel(max_model_len=2048)
    drafter = DraftModelDrafter(same, same.new_cache(240, 4), model.config.vocab_size)
    silent = Watched(drafter, "model", speaks=lambda tokens: len(tokens) % 97 < 20)
    engine, _ = mixture_run([silent, OracleDrafter(model, wrong_every=1)], model, max_tokens=200, prompts=2)
    assert engine.stats.num_accepted_tokens > 20


def test_it_reports_the_corrector_of_the_drafter_that_has_one() -> None:
    lookup, block = NgramDrafter(), NgramDrafter()
    assert MixtureDrafter([(lookup, 4), (block, 7)]).corrector is None
    block.corrector = "chain"
    assert MixtureDrafter([(lookup, 4), (block, 7)]).corrector == "chain"
