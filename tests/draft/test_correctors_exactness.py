"""The joint distribution of the engine's output with every corrector under every rule, by enumeration.

Unary logits and hidden states are random tables, and the correctors' weights are random and large, so that
their drafts follow the correction. The machinery is `tests.exactness`; the same test must reject a drafter
that reports the uncorrected q.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.engine.fake import fake_engine
from tests.exactness.test_joint import (
    IMPOSSIBLE,
    LENGTH,
    LIKELY,
    PROMPT,
    VOCAB,
    counts_of,
    expected_joint,
    p_value,
)
from tiny import save_tiny

from foredraft.config import EngineConfig
from foredraft.draft.backbone_config import config_for
from foredraft.draft.block import BlockDrafter
from foredraft.draft.block_model import BlockModel
from foredraft.draft.correctors import CORRECTORS, Sizes, SlotSampler, make_corrector
from foredraft.draft.correctors.candidates import top_candidates
from foredraft.draft.drafter import DraftRequest
from foredraft.draft.lattice import best_tree, normalised
from foredraft.draft.proposal import DenseProbs, DraftProposal, DraftTree, SparseProbs
from foredraft.models.batch import ragged_batch
from foredraft.models.load import load_model
from foredraft.sampling.params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

HIDDEN, GAMMA, CANDIDATES = 6, 4, 3
NUM_SAMPLES = 1000
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
CPU = torch.device("cpu")
DRAFT_IDS = torch.tensor([0, 2, 3, 4])


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
        self.corrector = make_corrector(name, sizes, {"num_candidates": num_candidates, **OPTIONS[name]}).eval()
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

    def observe(self, observations, features) -> None:
        pass

    def release(self, request_id: str) -> None:
        pass

    def num_reusable(self, block_table, block_hashes) -> int:
        return len(block_hashes)


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
    num_samples = NUM_SAMPLES if temperature else 4
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
    counts = counts_of(params, verification=verification, drafter=drafter, num_samples=NUM_SAMPLES)
    assert p_value(counts, expected_joint(params)) > LIKELY


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("name", ["markov", "rnn", "bilinear", "lattice", "chain"])
def test_power_the_uncorrected_q_is_caught(name: str, verification: str) -> None:
    params = SamplingParams(temperature=1.0)
    drafter = TableDrafter(name, CANDIDATES, lie=True)
    counts = counts_of(params, verification=verification, drafter=drafter, num_samples=NUM_SAMPLES)
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
    drafter = TableDrafter(name, CANDIDATES)
    counts = counts_of(params, verification=verification, drafter=drafter, num_samples=NUM_SAMPLES // 2)
    assert p_value(counts, expected_joint(params)) > LIKELY


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    """A real decoder over few enough tokens to enumerate."""
    directory = tmp_path_factory.mktemp("target")
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_tiny(directory, "llama", vocab_size=VOCAB, initializer_range=0.7, eos_token_id=None, **sizes)
    config = EngineConfig(str(directory), dtype="float32", device="cpu", skip_tokenizer_init=True)
    return load_model(config).model


def network_joint(network) -> dict[tuple[int, ...], float]:
    """The probability of every output of LENGTH tokens, from one forward over all of them."""
    outputs = list(itertools.product(range(VOCAB), repeat=LENGTH))
    texts = [[*PROMPT, *output] for output in outputs]
    tables = [[2 * index, 2 * index + 1] for index in range(len(texts))]
    batch = ragged_batch(texts, [0] * len(texts), tables, [LENGTH + 1] * len(texts), block_size=4, device=CPU)
    logits = network.forward(batch, network.new_cache(2 * len(texts), 4)).logits
    log_probs = logits.double().log_softmax(-1).reshape(len(texts), LENGTH + 1, VOCAB)[:, :LENGTH]
    totals = log_probs.gather(-1, torch.tensor(outputs)[..., None]).sum((1, 2)).exp()
    return dict(zip(outputs, totals.tolist(), strict=True))


@pytest.mark.parametrize(
    ("verification", "tree"),
    [("token", False), ("block", False), ("coupled", False), ("token", True), ("coupled", True)],
)
def test_the_whole_drafter_on_a_network(network, verification: str, tree: bool) -> None:
    """Backbone, features, context cache and corrector together, many ragged requests at a time."""
    torch.manual_seed(2)
    options = {"corrector": "chain", "corrector_options": {"num_candidates": CANDIDATES}, "conv_taps": 2}
    model = BlockModel(config_for(network.config, num_layers=1, num_draft_tokens=3, **options))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    drafter = BlockDrafter(model, network, 1500, 4, tree=tree)
    engine, factory = fake_engine(
        network,
        drafter,
        gamma=3,
        num_blocks=1500,
        max_num_seqs=500,
        max_num_batched_tokens=5000,
        verification=verification,
    )
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH)
    requests = []
    for seed in range(2 * NUM_SAMPLES):
        assembled = factory.assemble({"prompt_token_ids": PROMPT}, replace(params, seed=seed), None)
        requests += assembled.requests
        engine.add(assembled.requests[0])
    while engine.scheduler.has_unfinished:
        engine.step()
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    counts = Counter(tuple(request.output_token_ids) for request in requests)
    assert p_value(counts, network_joint(network)) > LIKELY
