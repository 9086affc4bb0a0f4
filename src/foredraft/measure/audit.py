"""Is speculation lossless on this model, with this drafter, on this machine? Measured from the outside.

Four checks: greedy identity, the distribution of sampled tokens, seeded identity, and equal log-probabilities. Each
says what it covered; a verdict without drafts is no verdict.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from foredraft.engine.lengths import FixedLengths
from foredraft.engine.llm import LLM
from foredraft.engine.outputs import RequestOutput
from foredraft.measure.distribution import (
    audit_draws,
    counts_p_value,
    normal_p_value,
    surprisals,
    target_probs,
    transformed,
    uniform_p_value,
)
from foredraft.measure.faults import FAULTS, softened_self_draft
from foredraft.measure.identity import NEAR_TIE, first_difference, logit_margin
from foredraft.models import native
from foredraft.sampling.params import SamplingParams

Prompt = Mapping[str, Any]
Progress = Callable[[int, int], None]

ALPHA = 1e-3
"""An audit of a lossless engine fails with this probability, over all of its p-values together."""

POSITIONS = 16
"""Output positions with a p-value of their own; later ones count in the pooled test."""


SAME_LOGITS = 1e-5
"""Log-probabilities of the same logits may differ by this: torch's sums depend on the number of rows."""


@dataclass(frozen=True)
class Check:
    """One check's result.

    Args:
        passed: None when it could not be made.
        cases: outputs, tokens or settings that it looked at.
        detail: what was seen, in a line.
        p_values: by test, for checks of a distribution.
        findings: what is wrong, one by one.
    """

    name: str
    passed: bool | None
    cases: int
    detail: str
    p_values: dict[str, float] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class AuditPlan:
    """How much is looked at.

    Args:
        params: temperature and the other parameters of the sampled checks; its seed and lengths are not used.
        max_tokens: output tokens of each greedy and seeded run.
        num_samples: sampled outputs, spread over the prompts.
        sample_tokens: tokens of each sampled output.
        num_joint: outputs of one prompt for the joint test.
    """

    params: SamplingParams
    max_tokens: int = 64
    num_samples: int = 160
    sample_tokens: int = 24
    num_joint: int = 400


@dataclass(frozen=True)
class Audit:
    """All checks with what was not covered."""

    checks: list[Check]
    not_covered: list[str]

    @property
    def lossless(self) -> bool:
        return all(check.passed is not False for check in self.checks)


def run_audit(llm: LLM, prompts: Sequence[Prompt], plan: AuditPlan, progress: Progress) -> Audit:
    """All four checks on an engine with a drafter."""
    checks = []
    steps: list[Callable[[], Check]] = [
        lambda: greedy_identity(llm, prompts, plan),
        lambda: sampled_distribution(llm, prompts, plan),
        lambda: joint_distribution(llm, prompts[0], plan),
        lambda: seeded_identity(llm, prompts, plan),
        lambda: equal_logprobs(llm, prompts, plan),
    ]
    for done, step in enumerate(steps):
        progress(done, len(steps))
        checks.append(step())
    progress(len(steps), len(steps))
    return Audit(checks, not_covered(llm, plan))


def self_test(llm: LLM, prompts: Sequence[Prompt], plan: AuditPlan, progress: Progress) -> Audit:
    """The sampled checks on engines with known faults, which they must find, and on one without, which must pass.

    The drafter is the target itself, softened, since some faults only exist for a drafter that draws at random.
    """
    checks = []
    faults = [None, *FAULTS]
    for done, fault in enumerate(faults):
        progress(done, len(faults))
        with _faulty(llm, fault):
            check = sampled_distribution(llm, prompts, plan, verification="token")
        least = min(check.p_values.values(), default=1.0)
        caught = check.passed is False
        checks.append(
            Check(
                name=f"self-test: {fault or 'no fault'}",
                passed=caught if fault else check.passed,
                cases=check.cases,
                detail=f"{'caught' if caught else 'not caught'}, least p-value {least:.1e}",
                p_values=check.p_values,
            )
        )
    progress(len(faults), len(faults))
    return Audit(checks, [])


@contextmanager
def _faulty(llm: LLM, fault: str | None) -> Iterator[None]:
    engine = llm.engine
    drafter, rules, lengths = engine.drafter, engine.rules, engine.lengths
    engine.lengths = FixedLengths()  # a cut for cost would hide what the fault does
    engine.drafter = softened_self_draft(engine)
    try:
        if fault is not None:
            FAULTS[fault](engine)
        yield
    finally:
        engine.drafter, engine.rules, engine.lengths = drafter, rules, lengths


def greedy_identity(llm: LLM, prompts: Sequence[Prompt], plan: AuditPlan) -> Check:
    """Greedy tokens with and without drafts; differences are near-ties or faults by the target's logit margin."""
    params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens)
    plain, drafted = _without_and_with_drafts(llm, prompts, params)
    findings, faults = [], 0
    for index, (left, right) in enumerate(zip(plain, drafted, strict=True)):
        ids = (left.outputs[0].token_ids, right.outputs[0].token_ids)
        difference = first_difference([ids[0]], [ids[1]])
        if difference is None:
            continue
        margin = logit_margin(llm.model, left.prompt_token_ids, ids[0], difference)
        near_tie = not llm.is_row_invariant and margin is not None and margin <= NEAR_TIE[llm.config.dtype]
        faults += not near_tie
        findings.append(
            {
                "prompt": index,
                "position": difference.position,
                "margin": margin,
                "kind": "near-tie" if near_tie else "fault",
            }
        )
    detail = f"{len(prompts) - len(findings)} of {len(prompts)} outputs identical"
    if findings:
        detail += f", {len(findings) - faults} near-ties, {faults} faults"
    return _drafted(drafted, Check("greedy identity", faults == 0, len(prompts), detail, findings=findings))


def sampled_distribution(
    llm: LLM, prompts: Sequence[Prompt], plan: AuditPlan, verification: str | None = None
) -> Check:
    """Sampled tokens against the target's distribution: by the randomised probability-integral transform, and by how
    surprising they are in sum."""
    rule = verification or _sampling_rule(llm)
    per_prompt = math.ceil(plan.num_samples / len(prompts))
    params = replace(plan.params, n=per_prompt, seed=1, max_tokens=plan.sample_tokens, min_tokens=0)
    outputs = llm.generate(list(prompts), params, verification=rule)
    values: dict[str, list[float]] = {"by probability": [], "by id": []}
    by_position: list[list[float]] = [[] for _ in range(POSITIONS)]
    surprise = variance = 0.0
    count = 0
    for output in outputs:
        for completion in output.outputs:
            tokens = completion.token_ids
            probs = target_probs(llm.model, output.prompt_token_ids, tokens, plan.params, llm.eos_token_ids)
            draws = audit_draws(count, len(tokens))
            count += 1
            ordered = transformed(probs, tokens, draws, by_probability=True).tolist()
            values["by probability"] += ordered
            values["by id"] += transformed(probs, tokens, draws, by_probability=False).tolist()
            for position, value in enumerate(ordered[:POSITIONS]):
                by_position[position].append(value)
            excess, spread = surprisals(probs, tokens)
            surprise, variance = surprise + float(excess.sum()), variance + float(spread.sum())
    p_values = {name: uniform_p_value(each) for name, each in values.items()}
    p_values["surprisal"] = normal_p_value(surprise, variance)
    p_values |= {f"position {k}": uniform_p_value(each) for k, each in enumerate(by_position) if len(each) >= 20}
    total = len(values["by id"])
    return _drafted(
        outputs,
        _by_p_values("sampled distribution", total, p_values, f"{total} tokens of {count} outputs, {rule} rule"),
    )


def joint_distribution(llm: LLM, prompt: Prompt, plan: AuditPlan) -> Check:
    """The first two tokens of one prompt, many times, against the joint probability of each frequent pair."""
    rule = _sampling_rule(llm)
    params = replace(plan.params, n=plan.num_joint, seed=2, max_tokens=3, min_tokens=0, ignore_eos=True)
    (output,) = llm.generate(prompt, params, verification=rule)
    counts = Counter(tuple(completion.token_ids[:2]) for completion in output.outputs)
    expected: dict[tuple[int, ...], float] = {}
    single = replace(plan.params, min_tokens=0)
    first = target_probs(llm.model, output.prompt_token_ids, [0], single, llm.eos_token_ids)[0]
    least = 5 / plan.num_joint
    for token in (first >= least).nonzero()[:, 0].tolist():
        rows = target_probs(llm.model, output.prompt_token_ids, [token, 0], single, llm.eos_token_ids)
        for second in (rows[1] * first[token] >= least).nonzero()[:, 0].tolist():
            expected[token, second] = float(first[token] * rows[1, second])
    p_value, cells = counts_p_value(counts, expected)
    detail = f"{plan.num_joint} outputs over {cells} cells, {rule} rule"
    return _by_p_values("joint of two tokens", plan.num_joint, {"pairs": p_value}, detail)


def seeded_identity(llm: LLM, prompts: Sequence[Prompt], plan: AuditPlan) -> Check:
    """The same seeds with drafts off, with several draft lengths, alone and together: the same tokens."""
    if not (llm.is_row_invariant or llm.config.dtype == "float32"):
        return Check("seeded identity", None, 0, "not promised in bfloat16 on this device without --invariant")
    chosen = list(prompts[:8])
    params = [replace(plan.params, seed=seed, n=1, max_tokens=plan.max_tokens // 2) for seed in range(len(chosen))]
    gamma = llm.config.speculative.num_speculative_tokens if llm.config.speculative else 0
    settings = [("off, alone", 0, True), ("off, together", 0, False)]
    settings += [(f"γ={g}, together", g, False) for g in sorted({1, (gamma + 1) // 2, gamma})]
    settings.append((f"γ={gamma}, alone", gamma, True))
    reference: list[list[int]] | None = None
    findings, outputs = [], []
    for name, length, alone in settings:
        if alone:
            outputs = [
                llm.generate(prompt, each, num_speculative_tokens=length, verification="coupled")[0]
                for prompt, each in zip(chosen, params, strict=True)
            ]
        else:
            outputs = llm.generate(chosen, params, num_speculative_tokens=length, verification="coupled")
        tokens = [output.outputs[0].token_ids for output in outputs]
        reference = reference or tokens
        difference = first_difference(reference, tokens)
        if difference is not None:
            findings.append({"setting": name, "prompt": difference.prompt, "position": difference.position})
    detail = f"{len(chosen)} seeds in {len(settings)} settings, {len(findings)} settings differ"
    return _drafted(outputs, Check("seeded identity", not findings, len(settings), detail, findings=findings))


def equal_logprobs(llm: LLM, prompts: Sequence[Prompt], plan: AuditPlan) -> Check:
    """Log-probabilities of greedy tokens with and without drafts."""
    params = SamplingParams(temperature=0.0, max_tokens=plan.max_tokens // 2, logprobs=5)
    plain, drafted = _without_and_with_drafts(llm, prompts[:8], params)
    largest, count = 0.0, 0
    for left, right in zip(plain, drafted, strict=True):
        for one, other in zip(left.outputs[0].logprobs or [], right.outputs[0].logprobs or [], strict=False):
            if one.keys() != other.keys():
                break  # another token or a near-tie among the top ones: greedy identity speaks of that
            largest = max(largest, *(abs(one[token].logprob - other[token].logprob) for token in one))
            count += 1
    limit = SAME_LOGITS if llm.is_row_invariant else 2 * NEAR_TIE[llm.config.dtype]
    detail = f"largest difference {largest:.2g} over {count} tokens (allowed {limit:g})"
    return _drafted(drafted, Check("equal log-probabilities", largest <= limit and count > 0, count, detail))


def not_covered(llm: LLM, plan: AuditPlan) -> list[str]:
    """What this audit says nothing of."""
    missing = ["outputs longer, prompts other and parameters other than those given here"]
    if not native.available() and llm.model.device.type == "cpu":
        missing.append(f"our CPU kernels: {native.why_not}")
    if not torch.cuda.is_available():
        missing.append("CUDA: this machine has no such device")
    if plan.params.is_greedy:
        missing.append("sampling: --temperature is 0")
    return missing


def _without_and_with_drafts(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    return llm.generate(list(prompts), params, num_speculative_tokens=0), llm.generate(list(prompts), params)


def _sampling_rule(llm: LLM) -> str:
    configured = llm.config.speculative.verification if llm.config.speculative else None
    tree = llm.config.speculative is not None and llm.config.speculative.tree_width > 1
    return configured or ("token" if tree else "block")


def _by_p_values(name: str, cases: int, p_values: dict[str, float], detail: str) -> Check:
    """Passed unless one p-value is too small, given how many there are."""
    limit = ALPHA / max(len(p_values), 1)
    least = min(p_values, key=lambda key: p_values[key])
    findings = [{"test": key, "p_value": value} for key, value in p_values.items() if value < limit]
    detail += f"; least p-value {p_values[least]:.2g} ({least}), limit {limit:.1g}"
    return Check(name, not findings, cases, detail, p_values, findings)


def _drafted(outputs: Sequence[RequestOutput], check: Check) -> Check:
    """A check in which nothing was drafted has tested nothing."""
    if sum(output.stats.num_draft_tokens for output in outputs) > 0:
        return check
    return replace(check, passed=None, detail="nothing was drafted, so nothing was tested; " + check.detail)
