"""The audit: a lossless engine passes, and engines with known faults do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.tiny import save_tiny

from foredraft import LLM, SpeculativeConfig
from foredraft.measure.audit import AuditPlan, greedy_identity, run_audit, seeded_identity, self_test
from foredraft.measure.distribution import audit_draws, counts_p_value, transformed, uniform_p_value
from foredraft.sampling.params import SamplingParams

PLAN = AuditPlan(SamplingParams(temperature=1.0), max_tokens=24, num_samples=400, sample_tokens=16, num_joint=800)
PROMPTS = [{"prompt_token_ids": [5, 9, 5, 9, 5, 9]}, {"prompt_token_ids": [1, 2, 3, 4, 1, 2, 3]}]


def quiet(done: int, total: int) -> None:
    pass


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audited")
    save_tiny(path, "llama", vocab_size=24)
    return path


@pytest.fixture
def llm(directory: Path) -> LLM:
    return LLM(
        str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        speculative=SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=4, adaptive=False),
    )


def test_a_lossless_engine_passes(llm: LLM) -> None:
    audit = run_audit(llm, PROMPTS, PLAN, quiet)
    assert [check.passed for check in audit.checks] == [True] * 5
    assert audit.lossless


def test_every_injected_fault_is_found(llm: LLM) -> None:
    audit = self_test(llm, PROMPTS, PLAN, quiet)
    assert {check.name: check.passed for check in audit.checks} == {
        "self-test: no fault": True,
        "self-test: wrong residual": True,
        "self-test: lying q": True,
        "self-test: leaking cut": True,
    }
    by_name = {check.name: min(check.p_values.values()) for check in audit.checks}
    assert by_name.pop("self-test: no fault") > 1e-4
    assert all(p_value < 1e-6 for p_value in by_name.values())


def test_wrong_tokens_are_named(llm: LLM) -> None:
    """An engine whose verification accepts every draft."""
    import foredraft.engine.verifying as verifying

    right = verifying.verify_match
    try:
        verifying.verify_match = lambda tokens, lengths, targets: right(targets[:, : tokens.shape[1]], lengths, targets)
        check = greedy_identity(llm, PROMPTS, PLAN)
        seeded = seeded_identity(llm, PROMPTS, PLAN)
    finally:
        verifying.verify_match = right
    assert check.passed is False
    assert {finding["kind"] for finding in check.findings} == {"fault"}
    assert seeded.passed is False


def test_an_audit_without_drafts_is_no_verdict(directory: Path) -> None:
    llm = LLM(
        str(directory),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        speculative=SpeculativeConfig(method="prediction"),
    )
    check = greedy_identity(llm, PROMPTS, PLAN)
    assert check.passed is None
    assert "nothing was drafted" in check.detail


@pytest.mark.parametrize("by_probability", [True, False])
def test_the_transform_is_uniform_for_right_draws_and_not_for_others(by_probability: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    probs = torch.rand(4000, 12, generator=generator, dtype=torch.float64).pow(2)
    probs[:, 3] = probs[:, 5]  # ties
    probs /= probs.sum(-1, keepdim=True)
    draws = audit_draws(0, 4000)
    right = torch.multinomial(probs, 1, generator=generator)[:, 0].tolist()
    values = transformed(probs, right, draws, by_probability=by_probability).tolist()
    assert uniform_p_value(values) > 1e-3
    weights = probs.sqrt() if by_probability else probs * torch.linspace(1, 1.5, 12)
    wrong = torch.multinomial(weights, 1, generator=generator)[:, 0].tolist()
    assert uniform_p_value(transformed(probs, wrong, draws, by_probability=by_probability).tolist()) < 1e-6


def test_counts_against_expectation() -> None:
    expected = {(0,): 0.5, (1,): 0.3}  # and 0.2 of others
    assert counts_p_value({(0,): 500, (1,): 300, (2,): 200}, expected) == (1.0, 3)
    assert counts_p_value({(0,): 560, (1,): 240, (2,): 200}, expected)[0] < 1e-3
