"""The joint distribution of the engine's output with every corrector under every rule, by enumeration.

Unary logits and hidden states are random tables, and the correctors' weights are random and large, so that
their drafts follow the correction. The machinery is `tests.exactness`; the same test must reject a drafter
that reports the uncorrected q.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.exactness.test_joint import IMPOSSIBLE, LIKELY, VOCAB, counts_of, expected_joint, p_value

from foredraft.draft.correctors import CORRECTORS, Sizes, SlotSampler, make_corrector
from foredraft.draft.correctors.candidates import top_candidates
from foredraft.draft.drafter import DraftRequest
from foredraft.draft.lattice import best_tree, normalised
from foredraft.draft.proposal import DenseProbs, DraftProposal, DraftTree, SparseProbs
from foredraft.sampling.params import SamplingParams

HIDDEN, GAMMA, CANDIDATES = 6, 4, 3
OPTIONS = {
    "none": {},
    "markov": {"rank": 4},
    "gated": {"rank": 4},
    "rnn": {"rank": 4},
    "gru": {"state_size": 4, "width": 4},
    "bilinear": {"rank": 4},
    "lattice": {"width": 8, "num_heads": 2, "rank": 4},
    "chain": {"rank": 4, "width": 8},
}
DRAFT_IDS = torch.tensor([0, 2, 3, 4])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors here are too small to share between threads, which would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TableDrafter:
    """A parallel drafter whose network is a table by the anchor and the token before it, with a real
    corrector.

    Args:
        lie: reports q of the uncorrected drafter for tokens drawn from the corrected one.
        tree: drafts best-first trees of this many nodes.
    """

    method = "table"
    feature_layers: tuple[int, ...] = ()

    def __init__(
        self,
        name: str,
        num_candidates: int | None,
        *,
        reduced: bool = False,
        lie: bool = False,
        tree: int = 0,
    ) -> None:
        torch.manual_seed(11)
        self.draft_ids = DRAFT_IDS if reduced else None
        sizes = Sizes(HIDDEN, VOCAB, GAMMA, self.draft_ids)
        self.corrector = make_corrector(
            name, sizes, {"num_candidates": num_candidates, **OPTIONS[name]}
        ).eval()
        for parameter in self.corrector.parameters():
            torch.nn.init.normal_(parameter, std=0.8)
        if name == "lattice":
            torch.nn.init.constant_(self.corrector.scale, 2.5)
        embedding = torch.randn(VOCAB, HIDDEN)
        self.corrector.bind(lambda ids: embedding[ids])
        self.corrector.freeze(torch.float32)
        self.unary = torch.randn(VOCAB, VOCAB, GAMMA, sizes.num_columns)
        self.hidden = torch.randn(VOCAB, VOCAB, GAMMA, HIDDEN)
        self.lie, self.tree = lie, tree
        self.correction = 0.0

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        before = torch.tensor([request.token_ids[-2] for request in requests])
        anchor = torch.tensor([request.token_ids[-1] for request in requests])
        unary, hidden, candidates = self.unary[before, anchor], self.hidden[before, anchor], None
        if self.corrector.num_candidates is not None:
            top = top_candidates(unary, self.corrector.num_candidates, self.draft_ids)
            unary, candidates = top.scores, top.token_ids
        lengths = torch.tensor([request.max_draft_tokens for request in requests])
        if self.tree:
            return self._trees(unary, hidden, anchor, candidates, lengths)
        sampler = SlotSampler([request.state for request in requests])
        drafts = self.corrector.correct(unary, hidden, anchor, sampler, candidates)
        uncorrected = unary.softmax(-1)
        probs = drafts.probs
        if probs.probs.shape == uncorrected.shape:
            self.correction = float((probs.probs - uncorrected).abs().sum(-1).mean())
        if self.lie:
            dense = isinstance(probs, DenseProbs)
            probs = DenseProbs(uncorrected) if dense else SparseProbs(probs.candidates, uncorrected)
        return DraftProposal(drafts.token_ids, torch.clamp(lengths, max=GAMMA), probs)

    def _trees(self, unary, hidden, anchor, candidates, lengths) -> DraftProposal:
        chain = normalised(self.corrector.lattice(unary, hidden, anchor, candidates))
        tree = best_tree(chain, self.tree)
        tokens = candidates[torch.arange(len(anchor))[:, None], tree.depths - 1, tree.columns]
        one_hot = SparseProbs(tokens[..., None], torch.ones_like(tokens[..., None], dtype=torch.float32))
        lengths = torch.minimum(tree.lengths, lengths)
        return DraftProposal(tokens, lengths, one_hot, tree=DraftTree(tree.parents, tree.depths))

    def observe(self, observations) -> None:
        pass

    def release(self, request_id: str) -> None:
        pass


KINDS = [(name, CANDIDATES, False) for name in CORRECTORS]
KINDS += [(name, None, False) for name in ("none", "markov", "gated", "rnn", "gru")]
KINDS += [("markov", None, True), ("chain", CANDIDATES, True)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize(("name", "num_candidates", "reduced"), KINDS)
def test_every_corrector_under_every_rule(
    name: str, num_candidates: int | None, reduced: bool, verification: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature)
    drafter = TableDrafter(name, num_candidates, reduced=reduced)
    num_samples = 4000 if temperature else 4
    counts = counts_of(params, verification=verification, drafter=drafter, num_samples=num_samples)
    assert p_value(counts, expected_joint(params)) > LIKELY
    if temperature == 1.0 and verification != "coupled" and name != "none":
        assert drafter.correction > 0.3, "the correction decided nothing"
    if not temperature:
        assert set(counts) == set(expected_joint(params))


@pytest.mark.parametrize("verification", ["token", "coupled"])
@pytest.mark.parametrize("name", ["none", "markov", "gated", "bilinear", "lattice", "chain"])
def test_best_first_trees_under_every_rule(name: str, verification: str) -> None:
    params = SamplingParams(temperature=1.0)
    drafter = TableDrafter(name, CANDIDATES, tree=GAMMA)
    counts = counts_of(params, verification=verification, drafter=drafter)
    assert p_value(counts, expected_joint(params)) > LIKELY


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", ["markov", "rnn", "bilinear", "lattice", "chain"])
def test_power_the_uncorrected_q_is_caught(name: str, verification: str) -> None:
    params = SamplingParams(temperature=1.0)
    drafter = TableDrafter(name, CANDIDATES, lie=True)
    counts = counts_of(params, verification=verification, drafter=drafter, num_samples=8000)
    assert p_value(counts, expected_joint(params)) < IMPOSSIBLE


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize("name", ["chain", "rnn"])
def test_transforms_and_corrections_together(name: str, verification: str) -> None:
    """Candidates that the request's transforms bar, penalties that see the drafts before, and truncation."""
    params = SamplingParams(
        temperature=0.8,
        top_k=4,
        top_p=0.95,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        logit_bias={1: -1.0, 3: 0.7},
    )
    counts = counts_of(params, verification=verification, drafter=TableDrafter(name, CANDIDATES))
    assert p_value(counts, expected_joint(params)) > LIKELY
