"""Correctors: the sampling form draws from what the teacher-forced form says, each follows its published
formula, and what is reported is what was drawn from."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foredraft.draft.correctors import CORRECTORS, Sizes, SlotSampler, make_corrector, makes_trees
from foredraft.draft.correctors.candidates import Candidates, top_candidates, with_extra
from foredraft.draft.lattice import normalised, path_log_probs
from foredraft.draft.proposal import DenseProbs, SparseProbs
from foredraft.errors import DrafterError
from foredraft.sampling.noise import Stream, gumbel
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, HIDDEN, SLOTS, BATCH, WIDTH = 23, 12, 4, 5, 6
SMALL = {
    "none": {},
    "markov": {"rank": 5},
    "gated": {"rank": 5},
    "rnn": {"rank": 5},
    "gru": {"state_size": 7, "width": 5},
    "bilinear": {"rank": 5},
    "lattice": {"width": 8, "num_heads": 2, "rank": 5},
    "chain": {"rank": 5, "width": 9},
}
FULL = [name for name in CORRECTORS if name != "lattice"]
BOTH = [(name, k) for name, k in itertools.product(CORRECTORS, (None, WIDTH)) if (name, k) != ("lattice", None)]
DRAFT_IDS = torch.tensor([1, 2, 3, 5, 8, 9, 13, 14, 17, 21, 22])


def build(name: str, num_candidates: int | None = None, draft_ids=None, confidence=None, wild: bool = True):
    """A corrector with random weights, large enough that the correction decides."""
    sizes = Sizes(HIDDEN, VOCAB, SLOTS, draft_ids)
    corrector = make_corrector(name, sizes, {"num_candidates": num_candidates, **SMALL[name]}, confidence=confidence)
    embedding = torch.randn(VOCAB, HIDDEN)
    corrector.bind(lambda ids: embedding[ids])
    if wild:
        with torch.no_grad():
            for parameter in corrector.parameters():
                parameter.normal_(std=1.0)
            if name == "lattice":
                corrector.scale.fill_(6.0)  # its edges are cosines
            if confidence is not None:
                corrector.confidence_head.proj.weight.mul_(0.2)
    return corrector.eval()


def inputs(columns: int = VOCAB):
    return (
        torch.randn(BATCH, SLOTS, columns) * 2,
        torch.randn(BATCH, SLOTS, HIDDEN),
        torch.randint(VOCAB, (BATCH,)),
    )


def states(verification: str = "token", count: int = BATCH, **options) -> list[SamplingState]:
    return [
        SamplingState(SamplingParams(seed=7 + i, **options), [1, 2, 3], vocab_size=VOCAB, verification=verification)
        for i in range(count)
    ]


@torch.no_grad()
def draw(corrector, unary, hidden, anchor, chosen, draft_ids=None):
    """Drafts, with candidates when the corrector has them; returns them with the candidates and unary scores
    used."""
    sampler = SlotSampler(chosen)
    if corrector.num_candidates is None:
        return corrector.correct(unary, hidden, anchor, sampler), None, unary
    top = top_candidates(unary, corrector.num_candidates, draft_ids)
    return corrector.correct(top.scores, hidden, anchor, sampler, top.token_ids), top.token_ids, top.scores


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS], ids=["full", "reduced"])
@pytest.mark.parametrize(("name", "num_candidates"), BOTH)
def test_q_is_the_teacher_forced_distribution(name: str, num_candidates: int | None, draft_ids) -> None:
    corrector = build(name, num_candidates, draft_ids)
    unary, hidden, anchor = inputs(VOCAB if draft_ids is None else len(draft_ids))
    drafts, candidates, scores = draw(corrector, unary, hidden, anchor, states(), draft_ids)
    previous = torch.cat([anchor[:, None], drafts.token_ids[:, :-1]], 1)
    with torch.no_grad():
        forced = corrector.teacher_forced(scores, hidden, previous, candidates).softmax(-1)
    assert torch.allclose(drafts.probs.probs, forced, atol=1e-5)
    if num_candidates is None and draft_ids is None:
        assert isinstance(drafts.probs, DenseProbs)
    else:
        assert isinstance(drafts.probs, SparseProbs)
        expected = candidates if candidates is not None else draft_ids.expand(BATCH, SLOTS, -1)
        assert torch.equal(drafts.probs.candidates, expected)
        assert bool((drafts.probs.candidates == drafts.token_ids[..., None]).any(-1).all())
    if name != "none":
        uncorrected = scores.softmax(-1)
        assert float((forced - uncorrected).abs().sum(-1).mean()) > 0.3, "the correction decides nothing"


@pytest.mark.parametrize("name", CORRECTORS)
def test_frozen_tables_change_nothing(name: str) -> None:
    corrector = build(name, WIDTH)
    unary, hidden, anchor = inputs()
    before = draw(corrector, unary, hidden, anchor, states())[0]
    corrector.freeze(torch.float32)
    after = draw(corrector, unary, hidden, anchor, states())[0]
    assert torch.equal(before.token_ids, after.token_ids)
    assert torch.allclose(before.probs.probs, after.probs.probs, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in CORRECTORS if name != "bilinear"])
def test_fresh_correctors_change_nothing(name: str) -> None:
    corrector = build(name, WIDTH, wild=False)
    unary, hidden, _ = inputs()
    top = top_candidates(unary, WIDTH)
    previous = torch.randint(VOCAB, (BATCH, SLOTS))
    assert torch.equal(corrector.teacher_forced(top.scores, hidden, previous, top.token_ids), top.scores)


@pytest.mark.parametrize(("name", "num_candidates"), BOTH)
def test_every_weight_learns(name: str, num_candidates: int | None) -> None:
    corrector = build(name, num_candidates, confidence={}).train()
    unary, hidden, anchor = inputs()
    candidates = None
    if num_candidates is not None:
        top = top_candidates(unary, num_candidates)
        unary, candidates = top.scores, top.token_ids
    previous = torch.cat([anchor[:, None], top_candidates(inputs()[0], 1).token_ids[:, 1:, 0]], 1)
    if candidates is not None:
        previous[:, 1:] = candidates[:, :-1, 1]  # true tokens that are among the candidates
    scores = corrector.teacher_forced(unary, hidden, previous, candidates)
    confidence = corrector.confidence_head(hidden, corrector.predecessor(previous), scores)
    (scores.log_softmax(-1)[..., 1].sum() + confidence.sum()).backward()
    for key, parameter in corrector.named_parameters():
        assert parameter.grad is not None, key
        assert float(parameter.grad.abs().sum()) > 0, key


@pytest.mark.parametrize("name", CORRECTORS)
def test_columns_that_are_masked_out_leave_gradients_finite(name: str) -> None:
    """As when the truth joins the candidates of a slot that has it already."""
    corrector = build(name, WIDTH, confidence={}).train()
    unary, hidden, anchor = inputs()
    top = top_candidates(unary, WIDTH)
    masked = top.scores.clone()
    masked[..., 2] = -math.inf
    previous = torch.cat([anchor[:, None], top.token_ids[:, :-1, 2]], 1)
    scores = corrector.teacher_forced(masked, hidden, previous, top.token_ids)
    assert bool((scores[..., 2] == -math.inf).all())
    confidence = corrector.confidence_head(hidden, corrector.predecessor(previous), scores)
    (scores.log_softmax(-1)[..., 0].sum() + confidence.sum()).backward()
    for key, parameter in corrector.named_parameters():
        assert parameter.grad is not None, key
        assert bool(parameter.grad.isfinite().all()), key


def one_step(name: str, corrector, hidden, token: int, embedding, state):
    """The bias of every token after `token`, [V], and the next state: the published formulas, one row at a
    time."""
    weights = dict(corrector.named_parameters())
    sigmoid = torch.sigmoid
    if name in ("markov", "gated"):
        a = weights["markov_w1.weight"][token]
        if name == "gated":
            joined = torch.cat([hidden, a])
            a = sigmoid(weights["gate_proj.weight"] @ joined + weights["gate_proj.bias"]) * a
        return weights["markov_w2.weight"] @ a, state
    if name == "rnn":
        rank = SMALL["rnn"]["rank"]
        state = torch.zeros(rank) if state is None else state
        joined = torch.cat([state, weights["markov_w1.weight"][token], hidden])
        joint = weights["joint_proj.weight"] @ joined + weights["joint_proj.bias"]
        gate, content, output = joint[:rank], joint[rank : 2 * rank], joint[2 * rank :]
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * torch.tanh(content)
        return weights["markov_w2.weight"] @ torch.tanh(output), state
    if name == "gru":
        size = SMALL["gru"]["state_size"]
        state = torch.zeros(size) if state is None else state
        from_input = weights["prefix_gru.weight_ih_l0"] @ embedding[token]
        from_state = weights["prefix_gru.weight_hh_l0"] @ state
        reset = sigmoid(from_input[:size] + from_state[:size])
        update = sigmoid(from_input[size : 2 * size] + from_state[size : 2 * size])
        content = torch.tanh(from_input[2 * size :] + reset * from_state[2 * size :])
        state = (1 - update) * content + update * state
        inner = weights["embed_proj.0.weight"] @ torch.cat([hidden, state])
        return weights["embed_proj.2.weight"] @ (inner * sigmoid(inner)), state
    if name == "bilinear":
        gated = weights["predecessor_codebook"][token] * (weights["hidden_projection.weight"] @ hidden)
        return weights["successor_codebook"] @ gated, state
    raise AssertionError(name)


@pytest.mark.parametrize("num_candidates", [None, WIDTH])
@pytest.mark.parametrize("name", ["markov", "gated", "rnn", "gru", "bilinear", "chain"])
@torch.no_grad()
def test_published_formulas(name: str, num_candidates: int | None) -> None:
    corrector = build(name, num_candidates)
    embedding = torch.stack([corrector.raw_embeddings(torch.tensor(token)) for token in range(VOCAB)])
    unary, hidden, anchor = inputs()
    drafts, candidates, _ = draw(corrector, unary, hidden, anchor, states())
    previous = torch.cat([anchor[:, None], drafts.token_ids[:, :-1]], 1)
    for request in range(BATCH):
        state = None
        for slot in range(SLOTS):
            token, h = int(previous[request, slot]), hidden[request, slot]
            base = unary[request, slot]
            if name == "chain":
                scaled = embedding / embedding.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()
                context = (corrector.project.weight @ h) * corrector.phi(scaled[token])
                bias = corrector.lambda_[slot] * (corrector.psi(scaled) @ context)
                base = corrector.alpha[slot] * base
            else:
                bias, state = one_step(name, corrector, h, token, embedding, state)
            expected = base + bias
            if candidates is not None:
                expected = expected[candidates[request, slot]]
            assert torch.allclose(drafts.probs.probs[request, slot], expected.softmax(-1), atol=1e-5)


def test_domino_leaves_its_pure_prefix_alone() -> None:
    sizes = Sizes(HIDDEN, VOCAB, SLOTS)
    corrector = make_corrector("gru", sizes, {"pure_prefix": 2})
    corrector.bind(lambda ids: torch.randn(len(ids), HIDDEN))
    for parameter in corrector.parameters():
        torch.nn.init.normal_(parameter)
    unary, hidden, _ = inputs()
    scores = corrector.teacher_forced(unary, hidden, torch.randint(VOCAB, (BATCH, SLOTS)))
    changed = (scores != unary).any(-1).all(0)
    assert changed.tolist() == [False, False, True, True]


FIRST_ORDER = [name for name in CORRECTORS if makes_trees(name)]


@pytest.mark.parametrize("name", FIRST_ORDER)
@torch.no_grad()
def test_the_lattice_has_the_probability_of_what_is_drawn(name: str) -> None:
    corrector = build(name, WIDTH)
    unary, hidden, anchor = inputs()
    drafts, candidates, scores = draw(corrector, unary, hidden, anchor, states())
    chain = normalised(corrector.lattice(scores, hidden, anchor, candidates))
    hits = candidates == drafts.token_ids[..., None]
    walked = (drafts.probs.probs * hits).sum(-1).double().log().cumsum(-1)
    assert torch.allclose(path_log_probs(chain, hits.int().argmax(-1)), walked, atol=1e-4)


@pytest.mark.parametrize(("name", "num_candidates"), BOTH)
def test_greedy_takes_the_largest_score(name: str, num_candidates: int | None) -> None:
    corrector = build(name, num_candidates)
    unary, hidden, anchor = inputs()
    drafts, candidates, scores = draw(corrector, unary, hidden, anchor, states(temperature=0.0))
    previous = torch.cat([anchor[:, None], drafts.token_ids[:, :-1]], 1)
    best = corrector.teacher_forced(scores, hidden, previous, candidates).argmax(-1, keepdim=True)
    expected = best if candidates is None else candidates.gather(-1, best)
    assert torch.equal(drafts.token_ids, expected[..., 0])
    assert isinstance(drafts.probs, SparseProbs)
    assert torch.equal(drafts.probs.candidates[..., 0], drafts.token_ids)
    assert bool((drafts.probs.probs == 1).all())


@pytest.mark.parametrize("name", CORRECTORS)
def test_coupled_drafts_take_their_token_ids_noise(name: str) -> None:
    """With K candidates, the token of the largest log q + G, where G belongs to (seed, absolute position,
    token id)."""
    corrector, temperature = build(name, WIDTH), 0.7
    unary, hidden, anchor = inputs()
    chosen = states("coupled", temperature=temperature)
    drafts, candidates, scores = draw(corrector, unary, hidden, anchor, chosen)
    previous = torch.cat([anchor[:, None], drafts.token_ids[:, :-1]], 1)
    forced = corrector.teacher_forced(scores, hidden, previous, candidates)
    for request, slot in itertools.product(range(BATCH), range(SLOTS)):
        noise = gumbel([chosen[request].seed], [3 + slot], Stream.COUPLED, VOCAB)[0]
        ids = candidates[request, slot]
        best = (forced[request, slot] / temperature + noise[ids]).argmax()
        assert int(drafts.token_ids[request, slot]) == int(ids[best])


@pytest.mark.parametrize("num_candidates", [None, WIDTH])
def test_transforms_see_the_drafts_before_and_the_targets_ids(num_candidates: int | None) -> None:
    corrector = build("chain", num_candidates)
    unary, hidden, anchor = inputs()
    bias, penalty, temperature = {4: 5.0, 7: -50.0}, 1.7, 0.8
    chosen = states(logit_bias=bias, frequency_penalty=penalty, temperature=temperature)
    drafts, candidates, scores = draw(corrector, unary, hidden, anchor, chosen)
    previous = torch.cat([anchor[:, None], drafts.token_ids[:, :-1]], 1)
    forced = corrector.teacher_forced(scores, hidden, previous, candidates).detach()
    for request, slot in itertools.product(range(BATCH), range(SLOTS)):
        ids = list(range(VOCAB)) if candidates is None else candidates[request, slot].tolist()
        before = drafts.token_ids[request, :slot].tolist()
        row = [
            (float(score) + bias.get(token, 0.0) - penalty * before.count(token)) / temperature
            for token, score in zip(ids, forced[request, slot], strict=True)
        ]
        expected = torch.tensor(row).softmax(-1)
        assert torch.allclose(drafts.probs.probs[request, slot], expected, atol=1e-5)


def test_a_request_whose_candidates_are_all_barred_still_has_a_distribution() -> None:
    corrector = build("chain", 3)
    unary, hidden, anchor = inputs()
    unary[..., 5] = -100.0
    drafts, candidates, _ = draw(corrector, unary, hidden, anchor, states(allowed_token_ids=[5]))
    assert bool(drafts.probs.probs.isfinite().all())
    assert torch.allclose(drafts.probs.probs.sum(-1), torch.ones(BATCH, SLOTS))
    assert not bool((candidates == 5).any())


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 3}, {"min_p": 0.05}])
@pytest.mark.parametrize("verification", ["block", "coupled"])
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_drawing_all_slots_at_once_and_in_turn_agree(name: str, verification: str, options: dict) -> None:
    """A bias of 0 changes nothing but the way: slots are then drawn one after another."""
    corrector = build(name, WIDTH, confidence={})
    unary, hidden, anchor = inputs()
    at_once = draw(corrector, unary, hidden, anchor, states(verification, **options))[0]
    in_turn = draw(corrector, unary, hidden, anchor, states(verification, logit_bias={0: 0.0}, **options))[0]
    assert torch.equal(at_once.token_ids, in_turn.token_ids)
    assert torch.allclose(at_once.probs.probs, in_turn.probs.probs, atol=1e-6)
    assert torch.equal(at_once.probs.candidates, in_turn.probs.candidates)
    assert torch.allclose(at_once.confidence, in_turn.confidence, atol=1e-6)


def test_requests_of_one_batch_keep_their_own_parameters() -> None:
    corrector = build("rnn", WIDTH)
    unary, hidden, anchor = inputs()
    mixed = [
        *states("coupled", 1, temperature=0.5),
        *states("token", 1),
        *states("block", 1, top_k=2),
        *states("token", 1, temperature=0.0),
        *states("coupled", 1, presence_penalty=2.0),
    ]
    together = draw(corrector, unary, hidden, anchor, mixed)[0]
    for index, state in enumerate(mixed):
        part = slice(index, index + 1)
        alone = draw(corrector, unary[part], hidden[part], anchor[part], [state])[0]
        assert torch.equal(alone.token_ids, together.token_ids[part])
        if not state.matches_target:
            assert torch.allclose(alone.probs.probs, together.probs.probs[part], atol=1e-6)
    assert bool(((together.probs.probs[2] > 0).sum(-1) == 2).all())


@pytest.mark.parametrize("name", CORRECTORS)
def test_confidence_never_depends_on_its_own_token(name: str) -> None:
    """Two draws that agree before a slot have the same confidence there, whatever came at the slot."""
    corrector = build(name, WIDTH, confidence={})
    unary, hidden, anchor = (x[:1].expand(200, *x.shape[1:]) for x in inputs())
    drafts, _, _ = draw(corrector, unary, hidden, anchor, states(count=200, temperature=8.0))
    assert drafts.confidence is not None
    seen: dict[tuple[int, ...], float] = {}
    for row, values in zip(drafts.token_ids.tolist(), drafts.confidence.tolist(), strict=True):
        for slot, value in enumerate(values):
            assert 0 < value < 1
            assert seen.setdefault(tuple(row[:slot]), value) == pytest.approx(value, abs=1e-6)
    assert len({tuple(row) for row in drafts.token_ids.tolist()}) > 5


def test_extra_candidates_join_as_states() -> None:
    ids = torch.tensor([[[4, 7, 9]]])
    scores = torch.tensor([[[3.0, 2.0, 1.0]]])
    extra = torch.tensor([[[7, 5, 5, 8]]])
    present = torch.tensor([[[True, True, True, False]]])
    joined = with_extra(Candidates(ids, scores), extra, present, 0.5)
    assert joined.token_ids.tolist() == [[[4, 7, 9, 7, 5, 5, 8]]]
    never = -math.inf
    assert joined.scores.tolist() == [[[3.0, 2.5, 1.0, never, 1.5, never, never]]]
    known = with_extra(Candidates(ids, scores), extra, present, 0.5, floor=torch.full((1, 1, 4), -2.0))
    assert known.scores[0, 0, 4] == -1.5


@pytest.mark.parametrize("name", FIRST_ORDER)
@pytest.mark.parametrize("verification", ["token", "coupled"])
@torch.no_grad()
def test_extra_candidates_keep_q_a_distribution(name: str, verification: str) -> None:
    corrector = build(name, WIDTH)
    unary, hidden, anchor = inputs()
    extra = torch.randint(VOCAB, (BATCH, SLOTS, 2))
    top = with_extra(top_candidates(unary, WIDTH), extra, torch.ones_like(extra, dtype=torch.bool), 1.0)
    sampler = SlotSampler(states(verification, logit_bias={3: 1.0}))
    drafts = corrector.correct(top.scores, hidden, anchor, sampler, top.token_ids)
    assert bool((top.token_ids == drafts.token_ids[..., None]).any(-1).all())
    if verification == "token":
        probs = drafts.probs.probs
        assert torch.allclose(probs.sum(-1), torch.ones(BATCH, SLOTS), atol=1e-5)
        for row, mass in zip(top.token_ids.flatten(0, 1).tolist(), probs.flatten(0, 1).tolist(), strict=True):
            likely = [token for token, p in zip(row, mass, strict=True) if p > 0]
            assert len(set(likely)) == len(likely), "a token has mass in two columns"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("markow", {}, "markow.*allowed: none, markov"),
        ("chain", {"ranc": 4}, "corrector chain.*ranc"),
        ("lattice", {"num_candidates": None}, "num_candidates"),
    ],
)
def test_wrong_configurations_are_named(name: str, options: dict, words: str) -> None:
    with pytest.raises(DrafterError, match=words):
        make_corrector(name, Sizes(HIDDEN, VOCAB, SLOTS), options)


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_candidates_are_drawn_by_the_noise_of_the_whole_vocabulary(verification: str) -> None:
    """One draw, two ways: the block rule looks past the accepted length, so its noise must be a step's own."""
    generator = torch.Generator().manual_seed(5)
    states = [
        SamplingState(SamplingParams(seed=seed), [1, 2], vocab_size=9, verification=verification) for seed in range(40)
    ]
    scores = torch.randn(40, 3, 9, generator=generator)
    everything = torch.arange(9).expand(40, 3, 9)
    whole, chosen = SlotSampler(states), SlotSampler(states)
    chosen.foresee(everything)
    for slot in range(3):
        whole.draw(scores[:, slot])
        chosen.draw(scores[:, slot], everything[:, slot])
    assert torch.equal(whole.token_ids, chosen.token_ids)
