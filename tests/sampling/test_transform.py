"""Properties of the transforms and the samplers at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.exactness.reference import distribution

from foredraft.errors import RequestError
from foredraft.sampling.choose import draw_drafts, sample
from foredraft.sampling.logprobs import top_logprobs
from foredraft.sampling.noise import Stream, gumbel, gumbel_at, uniforms
from foredraft.sampling.params import SamplingParams, StructuredOutputs
from foredraft.sampling.state import SamplingState
from foredraft.sampling.transform import invalid_rows, process_logits

logit_lists = st.lists(
    st.one_of(
        st.floats(-30, 30, width=32),
        st.sampled_from([0.0, 1.0, -1.0, 2.0, 1e-40, -math.inf]),
    ),
    min_size=1,
    max_size=12,
).filter(lambda values: max(values) > -math.inf)

truncations = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.5]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 100]),
        "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    }
)


def processed(logits: list[float], params: SamplingParams, **state) -> torch.Tensor:
    states = [SamplingState(params, [0], vocab_size=len(logits), **state)]
    return process_logits(torch.tensor([logits]), states, [[]])[0]


@settings(max_examples=400, deadline=None)
@given(logits=logit_lists, options=truncations)
def test_distributions_sum_to_one_within_the_support(logits: list[float], options: dict) -> None:
    result = processed(logits, SamplingParams(**options))
    p = result.double().softmax(-1)
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    assert all(p[token] == 0 for token, value in enumerate(logits) if value == -math.inf)
    assert p[int(torch.tensor(logits).argmax())] > 0, "the most probable token always stays"
    if 0 < options["top_k"] <= len(logits):
        kth = sorted(logits, reverse=True)[options["top_k"] - 1]
        assert all(logits[token] >= kth for token in (p > 0).nonzero()[:, 0].tolist())


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.floats(-8, 8, width=16), min_size=2, max_size=9),
    options=truncations,
)
def test_distributions_are_the_definitions(logits: list[float], options: dict) -> None:
    """Ties included, of which half-precision values have many. Cases on the edge of top-p or min-p are left out."""
    params = SamplingParams(**options)
    expected = distribution(np.array(logits), params, [0], [])
    nudged = [
        distribution(np.array(logits), SamplingParams(**{**options, **change}), [0], [])
        for change in (
            {"top_p": min(1.0, options["top_p"] * (1 + 1e-5))},
            {"top_p": options["top_p"] * (1 - 1e-5) if options["top_p"] < 1 else 1.0},
            {"min_p": min(1.0, options["min_p"] * (1 + 1e-5))},
            {"min_p": options["min_p"] * (1 - 1e-5)},
        )
    ]
    if any(not np.allclose(expected, other) for other in nudged):
        return
    p = processed(logits, params).double().softmax(-1).numpy()
    np.testing.assert_allclose(p, expected, atol=2e-6)


@settings(max_examples=100, deadline=None)
@given(logits=logit_lists, options=truncations)
def test_truncation_is_idempotent_at_temperature_one(logits: list[float], options: dict) -> None:
    params = SamplingParams(**{**options, "temperature": 1.0, "top_p": 1.0})
    once = processed(logits, params)
    again = processed(once.tolist(), params)
    assert torch.equal(once > -math.inf, again > -math.inf)


def test_top_p_of_zero_keeps_one_and_ties_go_to_the_lower_id() -> None:
    assert (processed([1.0, 3.0, 3.0], SamplingParams(top_p=0.0)) > -math.inf).tolist() == [False, True, False]
    assert (processed([0.0] * 4, SamplingParams(top_p=0.5)) > -math.inf).tolist() == [True, True, False, False]


def test_top_p_escalates_past_its_first_candidates() -> None:
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0)) * 0.1  # nearly flat
    states = [SamplingState(SamplingParams(top_p=top_p), [0], vocab_size=5000) for top_p in (0.9, 0.3)]
    result = process_logits(logits, states, [[], []])
    for row, top_p in enumerate((0.9, 0.3)):
        p = logits[row].double().softmax(-1).sort(descending=True).values
        expected = int((p.cumsum(0) - p < top_p).sum())
        assert int((result[row] > -math.inf).sum()) == expected


def test_a_vocabulary_of_one() -> None:
    for options in ({}, {"top_k": 5}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert processed([0.3], SamplingParams(**options)).softmax(-1).tolist() == [1.0]


def test_huge_and_denormal_logits() -> None:
    p = processed([3e38, -3e38, 1e-42], SamplingParams(temperature=0.7)).softmax(-1)
    assert p.isnan().any() or p.tolist() == [1.0, 0.0, 0.0]
    assert processed([1e-42, 0.0], SamplingParams()).softmax(-1).tolist() == pytest.approx([0.5, 0.5])


def test_rows_that_are_no_distribution_are_flagged_and_leave_neighbours_alone() -> None:
    params = SamplingParams(temperature=0.8, top_k=3, top_p=0.9, min_p=0.01)
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    states = [SamplingState(params, [0], vocab_size=6) for _ in range(4)]
    clean = process_logits(rows, states, [[]] * 4)
    broken = rows.clone()
    broken[1, 2] = math.nan
    broken[3] = -math.inf
    result = process_logits(broken, states, [[]] * 4)
    assert invalid_rows(result).tolist() == [False, True, False, True]
    assert torch.equal(result[[0, 2]], clean[[0, 2]])


def test_inputs_are_never_changed() -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    params = SamplingParams(
        top_k=2, top_p=0.5, min_p=0.1, logit_bias={1: 3.0}, repetition_penalty=1.5, min_tokens=3, stop_token_ids=[2]
    )
    process_logits(logits, [SamplingState(params, [1, 2], vocab_size=7, bad_words_token_ids=[[3]])], [[4, 5]])
    assert torch.equal(logits, before)


def test_plain_greedy_costs_nothing() -> None:
    logits = torch.randn(2, 5)
    states = [SamplingState(SamplingParams(temperature=0.0, top_k=1, top_p=0.1), [0], vocab_size=5)]
    assert process_logits(logits, states, [[1]]) is logits


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 4), st.integers(0, 6)), max_size=8))
def test_state_after_rejections_is_the_state_of_the_emitted_text(steps: list[tuple[list[int], int, int]]) -> None:
    """Steps of (draft, accepted, the target's token): only what was emitted leaves a trace."""
    params = SamplingParams(repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3, min_tokens=5)
    options = {"vocab_size": 7, "eos_token_ids": [6], "bad_words_token_ids": [[1, 2], [3]]}
    state = SamplingState(params, [0, 1], **options)
    emitted: list[int] = []
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    for draft, accepted, token in steps:
        process_logits(logits[: len(draft) + 1], [state], [draft])
        new = [*draft[: min(accepted, len(draft))], token]
        state.commit(new)
        emitted += new
    rebuilt = SamplingState(params, [0, 1], **options)
    rebuilt.commit(emitted)
    assert torch.equal(process_logits(logits[:1], [state], [[]]), process_logits(logits[:1], [rebuilt], [[]]))
    assert state.num_tokens == rebuilt.num_tokens


def test_a_row_along_the_draft_is_the_row_of_the_text_with_it() -> None:
    params = SamplingParams(
        temperature=0.9, repetition_penalty=1.4, frequency_penalty=0.7, min_tokens=3, stop_token_ids=[5]
    )
    options = {"vocab_size": 7, "bad_words_token_ids": [[1, 2], [3, 4, 6]]}
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    draft = [3, 4, 1, 0]
    rows = process_logits(logits, [SamplingState(params, [0, 2], **options)], [draft])
    for count in range(5):
        state = SamplingState(params, [0, 2], **options)
        state.commit(draft[:count])
        assert torch.equal(process_logits(logits[count : count + 1], [state], [[]])[0], rows[count])
    parents = [-1, 0, 0, 2]  # a tree: 3 -> (4, 1 -> 0)
    rows = process_logits(logits, [SamplingState(params, [0, 2], **options)], [draft], [parents])
    for row, path in enumerate([[], [3], [3, 4], [3, 1], [3, 1, 0]]):
        state = SamplingState(params, [0, 2], **options)
        state.commit(path)
        assert torch.equal(process_logits(logits[row : row + 1], [state], [[]])[0], rows[row])


# ---- samplers and noise


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.2, 1.0, 5.0]), min_size=1, max_size=8).filter(any),
    draw=st.one_of(st.floats(1e-300, 1 - 1e-16), st.sampled_from([2.0**-54, 1 - 2.0**-53])),
)
def test_sampling_never_gives_a_token_without_probability(weights: list[float], draw: float) -> None:
    token = int(sample(torch.tensor([weights]), torch.tensor([draw], dtype=torch.float64))[0])
    assert weights[token] > 0


def test_sampling_follows_the_probabilities() -> None:
    p = torch.tensor([0.5, 0.0, 0.2, 0.3])
    draws = (torch.arange(100000, dtype=torch.float64) + 0.5) / 100000
    counts = torch.bincount(sample(p.expand(100000, -1), draws), minlength=4)
    assert counts.tolist() == [50000, 0, 20000, 30000]


def test_uniforms_are_uniform_and_independent() -> None:
    seeds, positions = [5] * 20000, list(range(20000))
    for stream in Stream:
        draws = uniforms(seeds, positions, stream).numpy()
        assert stats.kstest(draws, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    across = uniforms(list(range(20000)), [3] * 20000, Stream.FINAL).numpy()
    assert stats.kstest(across, "uniform").pvalue > 1e-3


def test_gumbel_noise_is_gumbel_and_independent() -> None:
    noise = gumbel([1, 1, 2], [7, 8, 7], Stream.COUPLED, 49152)
    for row in noise:
        assert stats.kstest(row.numpy()[::3], "gumbel_r").pvalue > 1e-3
    correlations = np.corrcoef(noise.numpy())
    assert np.abs(correlations - np.eye(3)).max() < 0.02
    lagged = np.corrcoef(noise[0, :-1].numpy(), noise[0, 1:].numpy())[0, 1]
    assert abs(lagged) < 0.02


def test_noise_depends_on_nothing_but_its_key() -> None:
    alone = gumbel([9], [4], Stream.DRAFT, 100)
    assert torch.equal(gumbel([3, 9], [8, 4], Stream.DRAFT, 100)[1], alone[0])
    ids = torch.tensor([[99, 0, 5]])
    assert torch.equal(gumbel_at([9], [4], Stream.DRAFT, ids)[0], alone[0, ids[0]])
    assert not torch.equal(gumbel([9], [4], Stream.COUPLED, 100), alone)


def test_gumbel_sampling_follows_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    count = 40000
    noise = gumbel(list(range(count)), [0] * count, Stream.COUPLED, 4)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=4).numpy()
    assert stats.chisquare(counts, logits.double().softmax(-1).numpy() * count).pvalue > 1e-3


@pytest.mark.parametrize("verification", ["token", "coupled"])
def test_siblings_are_drawn_without_replacement(verification: str) -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    count = 20000
    states = [
        SamplingState(SamplingParams(seed=seed), [0], vocab_size=4, verification=verification) for seed in range(count)
    ]
    drawn = draw_drafts(logits.expand(count, -1), states, 0, width=2)
    p = logits.double().softmax(-1).numpy()
    pairs = drawn.token_ids[:, 0] * 4 + drawn.token_ids[:, 1]
    expected = np.array([[p[a] * p[b] / (1 - p[a]) if a != b else 0 for b in range(4)] for a in range(4)]).ravel()
    counts = torch.bincount(pairs, minlength=16).numpy()
    keep = expected > 0
    assert counts[~keep].sum() == 0
    assert stats.chisquare(counts[keep], expected[keep] * count).pvalue > 1e-3


# ---- log-probabilities and parameters


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(5))
    chosen = torch.tensor([2, 8, 0])
    for row, entry in enumerate(top_logprobs(logits, chosen, 3)):
        expected = logits[row].double().log_softmax(-1)
        order = expected.argsort(descending=True).tolist()
        assert set(entry) == {int(chosen[row]), *order[:3]}
        for token, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(expected[token]), abs=1e-5)
            assert logprob.rank == order.index(token) + 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", True),
        ("best_of", 0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.5),
        ("presence_penalty", -3),
        ("logit_bias", {5: 200.0}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", []),
        ("seed", "x"),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("max_tokens", 0),
        ("min_tokens", 20),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
        ("typical_p", 0.9),
        ("bad_words", [3]),
    ],
)
def test_wrong_parameters_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


def test_structured_outputs_take_exactly_one_form() -> None:
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputs()
    with pytest.raises(RequestError, match="exactly one"):
        StructuredOutputs(regex="a", choice=["a"])
