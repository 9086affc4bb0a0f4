"""The joint distribution of the engine's output against the target's, by enumeration.

A target of five tokens makes all outputs of three tokens countable. For every drafter, rule and combination of
parameters the engine decodes thousands of requests together, and a χ² test compares what came with what the definition
says. A test that accepts everything proves nothing, so the same test must reject engines with known faults.

Seeds are fixed, so a test passes or fails for good. `LIKELY` is far below what a right engine gives (about one test in
ten thousand would fail by chance when first written) and far above what the faults give.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from foredraft.draft.draft_model import DraftModelDrafter
from foredraft.draft.drafter import DraftRequest
from foredraft.draft.ngram import NgramDrafter
from foredraft.draft.prediction import PredictionDrafter
from foredraft.draft.proposal import DenseProbs, DraftProposal, SparseProbs
from foredraft.engine.verifying import RATIO_RULES
from foredraft.sampling.choose import sample
from foredraft.sampling.grammar import GrammarState, Vocabulary
from foredraft.sampling.noise import Stream, uniforms
from foredraft.sampling.params import SamplingParams, StructuredOutputs
from foredraft.sampling.state import SamplingState
from foredraft.verify import block as block_module
from foredraft.verify.block import verify_block
from foredraft.verify.token import verify_token
from tests.engine.fake import FakeModel, fake_engine
from tests.exactness.reference import distribution, joint, p_value

VOCAB, LENGTH, PROMPT = 5, 4, [1, 3, 1]
LIKELY = 1e-4
IMPOSSIBLE = 1e-9
NUM_SAMPLES = 4000

PARAMETERS = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7, "top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2, "temperature": 1.3},
    "mixed": {"top_k": 4, "top_p": 0.85, "min_p": 0.02, "temperature": 0.9},
    "repetition": {"repetition_penalty": 1.8},
    "frequency": {"frequency_penalty": 1.1, "presence_penalty": -0.7},
    "bias": {"logit_bias": {0: 2.0, 4: -3.0}, "top_k": 4},
    "allowed": {"allowed_token_ids": [0, 1, 4], "frequency_penalty": 0.9},
    "minimum": {"min_tokens": 2, "stop_token_ids": [2], "temperature": 1.2},
    "everything": {
        "temperature": 0.8,
        "top_k": 4,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "logit_bias": {1: -1.0},
        "min_tokens": 1,
        "stop_token_ids": [0],
    },
}


def target() -> FakeModel:
    return FakeModel(vocab_size=VOCAB, seed=1, sharpness=1.2, fast=True)


def drafter_of(kind: str, model: FakeModel, num_blocks: int):
    if kind == "ngram":
        return NgramDrafter(1, 2)
    if kind == "ngram_tree":
        return NgramDrafter(1, 2, tree_width=3)
    if kind == "prediction":
        return PredictionDrafter()
    width = 2 if kind == "draft_model_tree" else 1
    draft = FakeModel(vocab_size=VOCAB, seed=2 if kind != "adversary" else 1, sharpness=1.2, fast=True)
    if kind == "adversary":
        draft.table = -draft.table  # likes best what the target likes least
    return DraftModelDrafter(draft, draft.new_cache(num_blocks, 4), VOCAB, width)


DRAFTERS = ["ngram", "ngram_tree", "prediction", "draft_model", "draft_model_tree", "adversary"]


def counts_of(
    params: SamplingParams,
    *,
    kind: str = "draft_model",
    verification: str = "token",
    rules=RATIO_RULES,
    drafter=None,
    gamma: int = 4,
    num_samples: int = NUM_SAMPLES,
    bad_words: Sequence[Sequence[int]] = (),
    prediction: Sequence[int] = (0, 1, 2, 0),
    prepare: Callable[[SamplingState], None] | None = None,
) -> Counter[tuple[int, ...]]:
    """Outputs of `num_samples` requests, decoded many at a time with different seeds."""
    model, num_blocks = target(), 3 * 500
    drafter = drafter or drafter_of(kind, model, num_blocks)
    engine, factory = fake_engine(
        model,
        drafter,
        gamma=gamma,
        num_blocks=num_blocks,
        max_num_seqs=500,
        max_num_batched_tokens=5000,
        verification=verification,
        rules=rules,
    )
    requests = []
    for seed in range(num_samples):
        prompt = {"prompt_token_ids": PROMPT, "prediction": prediction}
        assembled = factory.assemble(prompt, replace(params, max_tokens=LENGTH, seed=seed), None)
        requests += assembled.requests
        assembled.requests[0].state.bad_words = [list(word) for word in bad_words]
        if prepare is not None:
            prepare(assembled.requests[0].state)
        engine.add(assembled.requests[0])
    while engine.scheduler.has_unfinished:
        engine.step()
    assert engine.stats.num_draft_tokens > 0, "nothing was drafted, so nothing was tested"
    return Counter(tuple(request.output_token_ids) for request in requests)


def expected_joint(
    params: SamplingParams,
    bad_words: Sequence[Sequence[int]] = (),
    allowed: Callable[[Sequence[int]], set[int]] | None = None,
) -> dict[tuple[int, ...], float]:
    """Outputs end early after a stop id, so shorter ones are summed from the full ones."""
    model = target()
    cache: dict[tuple[int, ...], object] = {}

    def after(output: tuple[int, ...]):
        if output not in cache:
            logits = model.next_logits([*PROMPT, *output]).numpy()
            cache[output] = distribution(logits, params, PROMPT, output, bad_words=bad_words, allowed=allowed)
        return cache[output]

    result: dict[tuple[int, ...], float] = {}
    stops = set(params.stop_token_ids or ())
    for output, probability in joint(after, VOCAB, LENGTH).items():
        end = next((place + 1 for place, token in enumerate(output) if token in stops), LENGTH)
        result[output[:end]] = result.get(output[:end], 0.0) + probability
    assert abs(sum(result.values()) - 1) < 1e-9
    return result


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_drafter_under_every_rule(kind: str, verification: str) -> None:
    if verification == "block" and kind.endswith("tree"):
        verification = "token"  # the block rule is for chains; configuration refuses the pair
    params = SamplingParams()
    counts = counts_of(params, kind=kind, verification=verification, num_samples=8000)
    assert p_value(counts, expected_joint(params)) > LIKELY


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize(
    ("kind", "verification"),
    [
        ("draft_model", "token"),
        ("draft_model", "block"),
        ("draft_model", "coupled"),
        ("draft_model_tree", "token"),
        ("draft_model_tree", "coupled"),
        ("ngram", "block"),
        ("ngram_tree", "token"),
    ],
)
def test_every_parameter(name: str, kind: str, verification: str) -> None:
    params = SamplingParams(**PARAMETERS[name])
    counts = counts_of(params, kind=kind, verification=verification)
    assert p_value(counts, expected_joint(params)) > LIKELY


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_bad_words(verification: str) -> None:
    words = [[2], [1, 3], [0, 4, 4]]
    params = SamplingParams(temperature=1.1)
    counts = counts_of(params, verification=verification, bad_words=words)
    assert p_value(counts, expected_joint(params, words)) > LIKELY


def after_grammar(output: Sequence[int]) -> set[int]:
    """What may follow under a*b?[cd]+, by its automaton; 4 is the end of the text."""
    moves = {
        "start": {0: "start", 1: "b", 2: "cd", 3: "cd"},
        "b": {2: "cd", 3: "cd"},
        "cd": {2: "cd", 3: "cd", 4: "end"},
    }
    state = "start"
    for token in output:
        state = moves.get(state, {4: "end"}).get(token, "nowhere")
    return set(moves.get(state, {4: "end"}))


@pytest.mark.parametrize(
    ("kind", "verification"),
    [
        *((kind, rule) for kind in DRAFTERS for rule in ("token", "coupled")),
        ("draft_model", "block"),
        ("ngram", "block"),
    ],
)
def test_grammars(kind: str, verification: str) -> None:
    params = SamplingParams(temperature=1.2, frequency_penalty=0.4, stop_token_ids=[4])
    vocabulary = Vocabulary([b"a", b"b", b"c", b"d", b""], [4], [4])

    def constrain(state) -> None:
        state.grammar = GrammarState(StructuredOutputs(regex="a*b?[cd]+"), vocabulary)

    counts = counts_of(params, kind=kind, verification=verification, num_samples=2500, prepare=constrain)
    assert p_value(counts, expected_joint(params, allowed=after_grammar)) > LIKELY


@pytest.mark.parametrize("gamma", [1, 2, 3, 7])
@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
def test_every_draft_length(gamma: int, verification: str) -> None:
    params = SamplingParams(temperature=0.9)
    counts = counts_of(params, verification=verification, gamma=gamma)
    assert p_value(counts, expected_joint(params)) > LIKELY


def test_parameters_do_not_leak_between_requests_of_a_batch() -> None:
    """Every request of a mixed batch has its own distribution."""
    model, num_blocks = target(), 1500
    drafter = drafter_of("draft_model", model, num_blocks)
    engine, factory = fake_engine(model, drafter, num_blocks=num_blocks, max_num_seqs=500, max_num_batched_tokens=5000)
    kinds = [SamplingParams(**options) for options in PARAMETERS.values()] + [SamplingParams(temperature=0.0)]
    requests: dict[int, list] = {index: [] for index in range(len(kinds))}
    for seed in range(1000):
        for index, params in enumerate(kinds):
            chosen = replace(params, max_tokens=LENGTH, seed=None if seed % 2 else seed)
            if chosen.seed is None:
                chosen = replace(chosen, seed=seed)  # a fixed seed all the same; the rule differs below
            assembled = factory.assemble({"prompt_token_ids": PROMPT}, chosen, None)
            request = assembled.requests[0]
            if seed % 2 and not params.is_greedy:
                request.state.verification, request.state.matches_target = ("token", "block")[seed // 2 % 2], False
            requests[index].append(request)
            engine.add(request)
    while engine.scheduler.has_unfinished:
        engine.step()
    for index, params in enumerate(kinds):
        counts = Counter(tuple(request.output_token_ids) for request in requests[index])
        assert p_value(counts, expected_joint(params)) > LIKELY


# ---- power: the same test must reject engines with known faults


class Lying:
    """A drafter whose reported q is not what it drew from."""

    method = "lying"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, inner, lie) -> None:
        self.inner, self.lie = inner, lie

    def propose(self, requests: Sequence[DraftRequest]) -> DraftProposal:
        return self.lie(self.inner.propose(requests), requests)

    def observe(self, observations, features) -> None:
        pass

    def release(self, request_id: str) -> None:
        self.inner.release(request_id)

    def num_reusable(self, block_table, block_hashes) -> int:
        return self.inner.num_reusable(block_table, block_hashes)


def argmax_with_softmax_q(proposal: DraftProposal, _) -> DraftProposal:
    tokens = proposal.probs.probs.argmax(-1)
    return DraftProposal(tokens, proposal.lengths, proposal.probs)


def sharper_q(proposal: DraftProposal, _) -> DraftProposal:
    squared = proposal.probs.probs.square()
    return DraftProposal(
        proposal.token_ids, proposal.lengths, DenseProbs(squared / squared.sum(-1, keepdim=True).clamp(min=1e-9))
    )


def one_hot_q(proposal: DraftProposal, _) -> DraftProposal:
    """Not a lie: given the draft that came, it is the distribution that came with it."""
    one_hot = torch.nn.functional.one_hot(proposal.token_ids, VOCAB).float()
    return DraftProposal(proposal.token_ids, proposal.lengths, DenseProbs(one_hot))


def cut_by_its_own_token(proposal: DraftProposal, _) -> DraftProposal:
    """A cut rule that leaks: a draft ends before an even token."""
    leaks = (proposal.token_ids % 2 == 0).int()
    lengths = torch.minimum(proposal.lengths, (leaks.cumsum(-1) == 0).sum(-1))
    return DraftProposal(proposal.token_ids, lengths, proposal.probs)


def cut_by_the_token_before(proposal: DraftProposal, _) -> DraftProposal:
    """A cut rule that may be: a draft ends after an even token."""
    leaks = (proposal.token_ids % 2 == 0).int()
    kept = 1 + (leaks.cumsum(-1) == 0).sum(-1)
    return DraftProposal(proposal.token_ids, torch.minimum(proposal.lengths, kept), proposal.probs)


def lying(lie, kind: str = "draft_model") -> Lying:
    return Lying(drafter_of(kind, target(), 1500), lie)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("lie", [argmax_with_softmax_q, sharper_q, cut_by_its_own_token])
def test_power_lying_drafters_are_caught(lie, verification: str) -> None:
    params = SamplingParams()
    counts = counts_of(params, verification=verification, drafter=lying(lie), num_samples=8000)
    assert p_value(counts, expected_joint(params)) < IMPOSSIBLE


@pytest.mark.parametrize("verification", ["token", "block", "coupled"])
@pytest.mark.parametrize("truth", [cut_by_the_token_before, one_hot_q])
def test_cutting_by_what_came_before_and_forgetting_the_draw_are_exact(truth, verification: str) -> None:
    params = SamplingParams()
    counts = counts_of(params, verification=verification, drafter=lying(truth), num_samples=8000)
    assert p_value(counts, expected_joint(params)) > LIKELY


def test_no_lie_can_bias_the_coupled_rule() -> None:
    params = SamplingParams()
    for lie in (argmax_with_softmax_q, cut_by_its_own_token):
        counts = counts_of(params, verification="coupled", drafter=lying(lie))
        assert p_value(counts, expected_joint(params)) > LIKELY


def flipped_residual(proposal, target_probs, accept, final):
    """The residual of q over p in place of p over q."""
    right = verify_token(proposal, target_probs, accept, final)
    rows = (right.num_accepted < proposal.lengths).nonzero()[:, 0]
    places = right.num_accepted[rows]
    tokens = right.token_ids.clone()
    residual = (proposal.probs.probs[rows, places] - target_probs[rows, places]).clamp(min=0)
    tokens[rows, places] = sample(residual, final[rows])
    return replace(right, token_ids=tokens)


def final_from_target(proposal, target_probs, accept, final):
    """A rejected position is drawn from p again, not from the residual."""
    right = verify_token(proposal, target_probs, accept, final)
    everything = replace(proposal, lengths=right.num_accepted)
    return verify_token(everything, target_probs, torch.zeros_like(accept), final)


def shared_noise(proposal, target_probs, accept, final):
    """The final token is drawn with the noise that accepted or rejected the draft."""
    return verify_token(proposal, target_probs, accept, accept[:, 0] if accept.shape[1] else final)


def stops_at_first_failure(proposal, target_probs, accept, final):
    """Block rule that ends at the first position whose draw fails: later ones never get to pass."""
    full = verify_block(proposal, target_probs, accept, final)
    best = None
    for length in range(int(proposal.lengths.max()) + 1):
        cut = accept.clone()
        cut[:, length:] = 1 - 1e-12
        part = verify_block(proposal, target_probs, cut, final)
        if best is None:
            best = part
        else:
            grew = (part.num_accepted == length) & (best.num_accepted == length - 1)
            best = replace(
                best,
                token_ids=torch.where(grew[:, None], part.token_ids, best.token_ids),
                num_accepted=torch.where(grew, part.num_accepted, best.num_accepted),
            )
    assert full.token_ids.shape == best.token_ids.shape
    return best


def without_residual_sum(proposal, target_probs, accept, final):
    """Block rule with h = w: the mass that could still be made up for is left out."""
    ratio = block_module.overlap
    try:
        block_module.overlap = lambda probs, scale, q: torch.zeros_like(scale)
        return verify_block(proposal, target_probs, accept, final)
    finally:
        block_module.overlap = ratio


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (flipped_residual, "token"),
        (final_from_target, "token"),
        (shared_noise, "token"),
        (stops_at_first_failure, "block"),
        (without_residual_sum, "block"),
    ],
)
@pytest.mark.parametrize("kind", ["draft_model", "adversary"])
def test_power_broken_rules_are_caught(broken, rule: str, kind: str) -> None:
    params = SamplingParams()
    counts = counts_of(params, kind=kind, verification=rule, rules={rule: broken}, num_samples=8000)
    assert p_value(counts, expected_joint(params)) < IMPOSSIBLE


@pytest.mark.parametrize("name", ["repetition", "frequency", "bias", "top_p", "min_p", "hot", "minimum"])
def test_power_a_parameter_that_is_not_applied_is_caught(name: str) -> None:
    counts = counts_of(SamplingParams(), verification="token")
    assert p_value(counts, expected_joint(SamplingParams(**PARAMETERS[name]))) < IMPOSSIBLE


def test_greedy_is_the_definition_for_every_drafter() -> None:
    for kind, options in itertools.product(DRAFTERS, PARAMETERS.values()):
        params = SamplingParams(**{**options, "temperature": 0.0})
        (expected,) = expected_joint(params)
        counts = counts_of(params, kind=kind, num_samples=3, prediction=expected)
        assert set(counts) == {expected}


def test_draws_of_different_streams_are_independent() -> None:
    seeds, positions = list(range(20000)), [7] * 20000
    draws = [uniforms(seeds, positions, stream) for stream in Stream]
    for first, second in itertools.combinations(draws, 2):
        correlation = torch.corrcoef(torch.stack([first, second]))[0, 1]
        assert abs(float(correlation)) < 4 / len(seeds) ** 0.5


def test_sparse_and_dense_q_give_the_same_decisions() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (64, 3, VOCAB)
    q = torch.rand(shape, generator=generator).pow(3)
    q = (q * (q > q.median())).clamp(min=0)
    q[..., 0] += 0.1
    q = q / q.sum(-1, keepdim=True)
    p = torch.rand(64, 4, VOCAB, generator=generator).pow(3)
    p = p / p.sum(-1, keepdim=True)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=generator).reshape(64, 3)
    lengths = torch.randint(0, 4, (64,), generator=generator)
    order = torch.rand(shape, generator=generator).argsort(-1)
    dense = DraftProposal(tokens, lengths, DenseProbs(q))
    sparse = DraftProposal(tokens, lengths, SparseProbs(order, q.gather(-1, order)))
    accept, final = torch.rand(64, 3, generator=generator).double(), torch.rand(64, generator=generator).double()
    for rule in (verify_token, verify_block):
        one, two = rule(dense, p, accept, final), rule(sparse, p, accept, final)
        assert torch.equal(one.num_accepted, two.num_accepted)
        for row, count in enumerate(one.num_accepted.tolist()):
            assert one.token_ids[row, : count + 1].tolist() == two.token_ids[row, : count + 1].tolist()
