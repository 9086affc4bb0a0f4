"""The block drafter in the engine: what it drafts never depends on how it got there, and the output is the
target's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.engine.fake import fake_engine, run
from tiny import save_tiny

from foredraft.config import EngineConfig
from foredraft.draft.backbone_config import config_for
from foredraft.draft.block import BlockDrafter
from foredraft.draft.block_model import BlockModel, load_block_model, save_block_model
from foredraft.draft.drafter import DraftRequest, Observation
from foredraft.draft.proposal import DraftProposal, SparseProbs
from foredraft.errors import DrafterError
from foredraft.models.batch import ragged_batch
from foredraft.models.load import load_model
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState

pytestmark = pytest.mark.usefixtures("one_thread")

GAMMA, BLOCK = 4, 4
PROMPTS = [[5, 17, 80, 3], [44], [9, 9, 2, 61, 7, 30, 12, 1, 55], [100, 4]]


def block_model(target, corrector: str = "chain", **options) -> BlockModel:
    """A random drafter; its weights are large enough that its drafts depend on all that they may depend
    on."""
    torch.manual_seed(3)
    draft_ids = options.pop("draft_ids", None)
    config = config_for(
        target.config,
        num_layers=2,
        num_draft_tokens=GAMMA,
        corrector=corrector,
        corrector_options=options.pop("corrector_options", {"num_candidates": 6}),
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        **options,
    )
    model = BlockModel(config, draft_ids)
    for parameter in model.backbone.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for parameter in model.corrector.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return model


def drafter_for(target, model: BlockModel, num_blocks: int = 64, **options) -> BlockDrafter:
    return BlockDrafter(model, target, num_blocks, BLOCK, **options)


class Watched:
    """A block drafter whose every draft must equal one of a fresh drafter that saw the whole text at once."""

    def __init__(self, target, model: BlockModel, num_blocks: int, **options) -> None:
        self.inner = drafter_for(target, model, num_blocks, **options)
        self.fresh = cache(lambda: drafter_for(target, model, num_blocks, **options))
        self.target, self.model = target, model
        self.method, self.feature_layers = self.inner.method, self.inner.feature_layers
        self.num_checked = self.num_released = 0
        self.parked: set[int] = set()
        self.num_steps = 0

    def propose(self, requests) -> DraftProposal:
        self.num_steps += 1
        if self.num_steps in self.parked:
            requests = [replace(request, max_draft_tokens=0) for request in requests]
        proposal = self.inner.propose(requests)
        for index, request in enumerate(requests):
            if request.max_draft_tokens:
                self._check(proposal, index, request)
        return proposal

    def _check(self, proposal: DraftProposal, index: int, request: DraftRequest) -> None:
        table = list(range(-(-(len(request.token_ids) + request.max_draft_tokens) // BLOCK)))
        context = list(request.token_ids[:-1])
        fresh = self.fresh()
        if context:
            batch = ragged_batch([context], [0], [table], [1], block_size=BLOCK, device=torch.device("cpu"))
            cache = self.target.new_cache(64, BLOCK)
            features = self.target.forward(batch, cache, self.feature_layers).features
            fresh.observe([Observation("only", 0, range(len(context)), table)], features)
        expected = fresh.propose([replace(request, request_id="only", block_table=table)])
        fresh.release("only")
        count = int(proposal.lengths[index])
        assert count == int(expected.lengths[0])
        assert (count > 0) == bool(context)
        assert proposal.token_ids[index, :count].tolist() == expected.token_ids[0, :count].tolist()
        mine = _dense(proposal, index, count, self.target.config.vocab_size)
        assert torch.allclose(mine, _dense(expected, 0, count, self.target.config.vocab_size), atol=1e-4)
        if proposal.tree is not None:
            assert proposal.tree.parents[index, :count].tolist() == expected.tree.parents[0, :count].tolist()
        if proposal.confidence is not None:
            assert torch.allclose(proposal.confidence[index, :count], expected.confidence[0, :count], atol=1e-4)
        self.num_checked += 1

    def observe(self, observations, features) -> None:
        self.inner.observe(observations, features)

    def release(self, request_id: str) -> None:
        self.num_released += 1
        self.inner.release(request_id)

    def num_reusable(self, block_table, block_hashes) -> int:
        return self.inner.num_reusable(block_table, block_hashes)


def _dense(proposal: DraftProposal, index: int, count: int, vocab_size: int) -> torch.Tensor:
    probs = proposal.probs
    if isinstance(probs, SparseProbs):
        rows = torch.zeros(count, vocab_size)
        return rows.scatter_add_(1, probs.candidates[index, :count], probs.probs[index, :count].float())
    return probs.probs[index, :count]


def generate(target, drafter, params, *, num_blocks: int = 64, verification=None, **options):
    engine, factory = fake_engine(
        target,
        drafter,
        gamma=GAMMA,
        num_blocks=num_blocks,
        block_size=BLOCK,
        verification=verification,
        **options,
    )
    return run(engine, factory, PROMPTS, params), engine


def tokens_of(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


VARIANTS = {
    "chain": {},
    "masks_predict": {"anchor_predicts": False},
    "convolution": {"conv_taps": 2, "conv_group_size": 6},
    "carry": {"carry": True},
    "reduced": {"draft_ids": torch.arange(0, 100, 3)},
    "confidence": {"confidence": {}},
    "markov_full": {"corrector": "markov", "corrector_options": {"rank": 8}},
    "gru_full_reduced": {
        "corrector": "gru",
        "corrector_options": {"width": 8, "state_size": 8},
        "draft_ids": torch.arange(0, 100, 3),
    },
    "rnn": {"corrector": "rnn", "corrector_options": {"rank": 8, "num_candidates": 5}},
    "lattice": {"corrector": "lattice", "corrector_options": {"width": 8, "num_candidates": 5}},
    "mask_token": {"mask_token_id": 0, "qk_norm": True},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_and_seeded_output_is_plain_decoding(target, name: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24)
    plain, _ = generate(target, None, params, verification="coupled")
    watched = Watched(target, block_model(target, **VARIANTS[name]), 64)
    outputs, engine = generate(target, watched, params, verification="coupled")
    assert tokens_of(outputs) == tokens_of(plain)
    assert engine.stats.num_draft_tokens > 50
    assert watched.num_checked > 50
    assert watched.num_released == len(PROMPTS)
    assert not watched.inner._contexts


@pytest.mark.parametrize("verification", ["token", "block"])
def test_drafts_never_depend_on_how_the_text_came_about(target, verification: str) -> None:
    """Rejections, chunked prompts, parked stretches and preemption leave the drafts of a fresh drafter."""
    watched = Watched(target, block_model(target, confidence={}), 13)
    watched.parked = {3, 4, 5, 6, 9, 12, 13}
    # Few tokens to choose from, so that an untrained drafter's drafts are often accepted.
    params = SamplingParams(temperature=4.0, seed=9, max_tokens=20, allowed_token_ids=[3, 40, 77])
    outputs, engine = generate(
        target,
        watched,
        params,
        num_blocks=13,
        verification=verification,
        max_num_batched_tokens=12,
    )
    assert engine.scheduler.num_preemptions > 0, "nothing was preempted, so nothing was tested"
    assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens
    assert all(len(tokens) == 20 for tokens in tokens_of(outputs))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_are_plain_decoding_and_accept_more(target, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=24)
    plain, _ = generate(target, None, params, verification="coupled")
    watched = Watched(target, block_model(target), 64, tree=True)
    outputs, engine = generate(target, watched, params, verification="coupled")
    assert tokens_of(outputs) == tokens_of(plain)
    assert watched.num_checked > 20
    assert engine.stats.num_draft_tokens > 50


def test_a_tree_that_may_branch_does(target) -> None:
    drafter = drafter_for(target, block_model(target), tree=True)
    drafter._corrector.alpha.fill_(0.02)  # nearly even candidates
    drafter._corrector.lambda_.fill_(0.0)
    proposal = drafter.propose([observed(drafter, target, [5, 17, 80, 3], 12)])
    assert proposal.lengths.tolist() == [12]
    assert len(set(proposal.tree.parents[0].tolist())) < 12
    parents, tokens = proposal.tree.parents[0].tolist(), proposal.token_ids[0].tolist()
    assert len(set(zip(parents, tokens, strict=True))) == 12


def observed(drafter, target, text: list[int], max_draft_tokens: int, request_id: str = "a", **params) -> DraftRequest:
    """A request whose features before the anchor the drafter has seen."""
    table = list(range(40))
    batch = ragged_batch([text[:-1]], [0], [table], [1], block_size=BLOCK, device=target.device)
    features = target.forward(batch, target.new_cache(40, BLOCK), drafter.feature_layers).features
    drafter.observe([Observation(request_id, 0, range(len(text) - 1), table)], features)
    state = SamplingState(SamplingParams(seed=1, **params), text, vocab_size=target.config.vocab_size)
    return DraftRequest(request_id, text, table, max_draft_tokens, state)


def test_no_features_no_draft(target) -> None:
    drafter = drafter_for(target, block_model(target))
    request = observed(drafter, target, [5, 17, 80, 3], 4)
    unseen = replace(request, request_id="b")
    ahead = replace(request, token_ids=[5, 17, 80, 3, 9])
    parked = replace(request, max_draft_tokens=0)
    for other in (unseen, ahead, parked):
        proposal = drafter.propose([other, request, other])
        assert proposal.lengths.tolist() == [0, 4, 0]
        assert proposal.token_ids.shape == (3, 4)
    drafter.release("a")
    assert drafter.propose([request]).lengths.tolist() == [0]


def test_features_after_a_gap_are_not_used(target) -> None:
    drafter = drafter_for(target, block_model(target))
    request = observed(drafter, target, [5, 17, 80, 3], 4)
    width = len(drafter.feature_layers)
    drafter.observe([Observation("a", 7, range(2), range(40))], [torch.randn(2, 36) for _ in range(width)])
    assert drafter.propose([replace(request, token_ids=list(range(10)))]).lengths.tolist() == [0]
    assert drafter.propose([request]).lengths.tolist() == [4]


def test_positions_seen_again_are_replaced(target) -> None:
    """Features that come again from some position on (a request that is computed again) count from there."""
    model = block_model(target)
    text = [5, 17, 80, 3, 61, 2]
    once, again = drafter_for(target, model), drafter_for(target, model)
    expected = once.propose([observed(once, target, text, 4, temperature=0.0)])
    wrong = tuple(torch.randn(5, 36) for _ in model.config.target_layers)
    for written in (False, True):
        again.observe([Observation("a", 0, range(5), range(40))], wrong)
        request = observed(again, target, text, 4, temperature=0.0)
        if written:
            again.propose([request])
            again.observe([Observation("a", 0, range(5), range(40))], wrong)
            again.propose([request])
            request = observed(again, target, text, 4, temperature=0.0)
        assert torch.equal(again.propose([request]).token_ids, expected.token_ids)


def test_lengths_are_as_wanted_whatever_the_neighbours(target) -> None:
    model = block_model(target, conv_taps=2)
    drafter = drafter_for(target, model)
    wanted = [1, 4, 0, 9, 2]
    requests = [
        replace(
            observed(drafter, target, [5, 17 + i, 80, 3 + i], want, f"r{i}"),
            block_table=[3 * i, 3 * i + 1, 3 * i + 2],
        )
        for i, want in enumerate(wanted)
    ]
    together = drafter.propose(requests)
    assert together.lengths.tolist() == [1, 4, 0, 4, 2]
    for index, request in enumerate(requests):
        count = int(together.lengths[index])
        if count:
            alone = drafter.propose([request])
            assert alone.token_ids[0, :count].tolist() == together.token_ids[index, :count].tolist()
            mine, theirs = alone.probs.probs[0, :count], together.probs.probs[index, :count]
            assert torch.allclose(mine, theirs, atol=1e-4)


def test_no_draft_goes_past_the_context(target) -> None:
    drafter = drafter_for(target, block_model(target))
    longest = target.config.max_model_len
    for spare, expected in ((0, 0), (1, 1), (2, 2), (50, 4)):
        text = [7] * (longest - spare)
        assert drafter.propose([observed(drafter, target, text, 4)]).lengths.tolist() == [expected]
        drafter.release("a")


@pytest.mark.parametrize("name", VARIANTS)
def test_saved_drafters_draft_alike(target, tmp_path, name: str) -> None:
    model = block_model(target, **VARIANTS[name])
    save_block_model(model, tmp_path)
    for params in ({"temperature": 0.0}, {"temperature": 1.0}):
        proposals = []
        for each in (model, load_block_model(tmp_path)):
            drafter = drafter_for(target, each)
            proposals.append(drafter.propose([observed(drafter, target, [5, 17, 80, 3], 4, **params)]))
        first, second = proposals
        assert torch.equal(first.token_ids, second.token_ids)
        assert torch.equal(first.probs.probs, second.probs.probs)
        if first.confidence is not None:
            assert torch.equal(first.confidence, second.confidence)


def test_allowed_tokens_become_candidates(target) -> None:
    """Candidates come from what a request allows, or it would hardly ever accept a draft."""
    drafter = drafter_for(target, block_model(target))
    request = observed(drafter, target, [5, 17, 80, 3], 4, allowed_token_ids=[90, 91, 92])
    proposal = drafter.propose([request])
    assert set(proposal.token_ids[0].tolist()) <= {90, 91, 92}
    assert torch.allclose(proposal.probs.probs.sum(-1), torch.ones(1, 4))


def test_what_does_not_fit_is_refused(target) -> None:
    with pytest.raises(DrafterError, match="corrector rnn.*no trees"):
        drafter_for(target, block_model(target, **VARIANTS["rnn"]), tree=True)
    other = block_model(target)
    other.config = replace(other.config, vocab_size=50)
    with pytest.raises(DrafterError, match="vocab_size is 50, the target's 101"):
        drafter_for(target, other)


@pytest.mark.parametrize(("corrector", "anchor_predicts"), [("chain", True), ("chain", False), ("gru", False)])
def test_what_the_training_form_learns_is_accepted(target, corrector: str, anchor_predicts: bool) -> None:
    """A few steps on the target's own greedy texts, teacher forced, make drafts for these texts that are
    accepted: the two forms agree about which slot predicts what, given which tokens and features."""
    length, num_candidates = 40, 12
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, greedy_texts(target, length), strict=True)]
    texts = [torch.tensor(text[:length]) for text in texts]
    tokens = torch.stack(texts)  # [B, S]
    config = config_for(
        target.config,
        num_layers=1,
        num_draft_tokens=GAMMA,
        anchor_predicts=anchor_predicts,
        corrector=corrector,
        corrector_options={"num_candidates": num_candidates},
    )
    torch.manual_seed(0)
    model = BlockModel(config).train()
    model.bind(target.embed)
    features = torch.stack([features_of(target, text.tolist(), config.target_layers) for text in texts])
    anchors = torch.arange(2, length - GAMMA).expand(len(texts), -1)  # [B, A]
    offsets = torch.arange(GAMMA)
    rows = torch.arange(len(texts))[:, None, None]
    previous = tokens[rows, anchors[..., None] + offsets]  # [B, A, γ], the token before each slot
    truth = tokens[rows, anchors[..., None] + offsets + 1]
    embeddings = target.embed(tokens.flatten()).reshape(len(texts), length, -1).clone()
    anchor_embeddings = embeddings[torch.arange(len(texts))[:, None], anchors]
    head = target.head.rows(torch.arange(target.config.vocab_size)).clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(60):
        hidden = model.backbone(features, anchors, anchor_embeddings).flatten(0, 1)  # [B·A, γ, d]
        unary = hidden @ head.T
        top = unary.topk(num_candidates, dim=-1).indices
        top = torch.cat([truth.flatten(0, 1)[..., None], top], -1)  # the truth is always among the candidates
        scores = unary.gather(-1, top)
        repeated = (top[..., 1:] == top[..., :1]).nonzero(as_tuple=True)
        scores = scores.index_put((*repeated[:-1], repeated[-1] + 1), torch.tensor(float("-inf")))
        corrected = model.corrector.teacher_forced(scores, hidden, previous.flatten(0, 1), top)
        loss = torch.nn.functional.cross_entropy(unary.flatten(0, 1), truth.flatten())
        loss = loss - corrected.log_softmax(-1)[..., 0].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    params = SamplingParams(temperature=0.0, max_tokens=24)
    drafter = drafter_for(target, model)
    outputs, engine = generate(target, drafter, params)
    assert tokens_of(outputs) == tokens_of(generate(target, None, params)[0])
    assert engine.stats.mean_acceptance_length > 3.0


def greedy_texts(target, length: int) -> list[list[int]]:
    return tokens_of(generate(target, None, SamplingParams(temperature=0.0, max_tokens=length))[0])


def features_of(target, text: list[int], layers) -> torch.Tensor:
    """Concatenated features of a whole text [S, m·d]."""
    blocks = list(range(-(-len(text) // BLOCK)))
    batch = ragged_batch([text], [0], [blocks], [1], block_size=BLOCK, device=target.device)
    return torch.cat(target.forward(batch, target.new_cache(len(blocks), BLOCK), layers).features, -1).clone()


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["chain", "convolution", "reduced", "rnn", "lattice"])
def test_cuda_drafts_as_the_cpu_does(tmp_path, name: str) -> None:
    save_tiny(tmp_path, "llama", eos_token_id=None)
    found = []
    for device in ("cpu", "cuda"):
        config = EngineConfig(str(tmp_path), dtype="float32", device=device, skip_tokenizer_init=True)
        target = load_model(config).model
        drafter = drafter_for(target, block_model(target, **VARIANTS[name]))
        found.append(
            [drafter.propose([observed(drafter, target, [5, 17, 80, 3], 4, temperature=t)]) for t in (0.0, 1.0)]
        )
        drafter.release("a")
    for cpu, cuda in zip(*found, strict=True):
        assert torch.equal(cpu.token_ids, cuda.token_ids.cpu())
        assert torch.allclose(cpu.probs.probs, cuda.probs.probs.cpu(), atol=1e-3)
