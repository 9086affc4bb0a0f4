"""Plain and speculative decoding of the same prompts, taking turns in one process.

Owns the order of the runs and what is recorded of them; `figures` makes numbers of it, `report` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

from foredraft.engine.llm import LLM
from foredraft.engine.stats import PHASES, StepTimes
from foredraft.errors import RequestError
from foredraft.measure.figures import Round, Sample
from foredraft.measure.forward import ForwardCost, forward_cost
from foredraft.measure.identity import NEAR_TIE, Difference, first_difference, logit_margin
from foredraft.measure.memory import peak_memory, process_peak, reset_peak
from foredraft.measure.prompts import PromptRecord, encoded, has_template
from foredraft.sampling.params import SamplingParams

BASELINE = "baseline"
SPECULATIVE = "speculative"
TRANSFORMERS = "transformers"

Promise = Literal["identical", "near_ties", "none"]
Mode = Callable[[Sequence[int]], list[Sample]]
"""Answers the prompts with the given indices, together."""


@dataclass(frozen=True)
class Disagreement:
    """The first difference of two modes, with the target's logit gap there (None where one output ended)."""

    where: Difference
    margin: float | None


@dataclass(frozen=True)
class BenchRun:
    """What was measured.

    Args:
        prompts: the prompts, and `prompt_ids` their tokens as all modes saw them.
        rounds: by mode, one entry per round.
        promise: what speculation owes the baseline, see `promise_of`.
        differences: of other modes against the baseline, by mode; only modes that differ are in it.
        load_peak: bytes of resident memory at the peak up to the first measured run.
    """

    prompts: Sequence[PromptRecord]
    prompt_ids: Sequence[Sequence[int]]
    rounds: Mapping[str, Sequence[Round]]
    promise: Promise
    differences: Mapping[str, Disagreement]
    load_peak: int
    forward: ForwardCost
    params: SamplingParams
    batch: int
    chat_template: bool

    def near_tie(self, mode: str) -> bool:
        """Whether the mode's difference is one that rounding may decide either way."""
        found = self.differences.get(mode)
        tolerance = NEAR_TIE["float32" if self.promise == "identical" else "bfloat16"]
        return found is not None and found.margin is not None and found.margin <= tolerance

    @property
    def broken(self) -> bool:
        """Whether the speculative outputs differ from plain decoding where they must not."""
        if SPECULATIVE not in self.differences:
            return False
        if self.promise == "near_ties":
            return self.params.temperature == 0 and not self.near_tie(SPECULATIVE)
        return self.promise == "identical"


@dataclass(frozen=True)
class Inputs:
    """Prompts as the engine takes them, each with its token ids, and whether the template rendered them."""

    prompts: Sequence[Mapping[str, Any]]
    chat_template: bool

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(prompt["prompt_token_ids"]) for prompt in self.prompts]


@dataclass
class Plan:
    """How to run: `rounds` times over all prompts, `batch` of them at once."""

    rounds: int = 3
    batch: int = 1
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0, max_tokens=128))
    progress: Callable[[int, int], None] | None = None


def encode_all(llm: LLM, prompts: Sequence[PromptRecord], chat_template: bool | None = None) -> Inputs:
    """Prompts as token ids, once, so that all modes see the same.

    Args:
        chat_template: render them by the model's template; None: when it has one.
    """
    templated = has_template(llm) if chat_template is None else chat_template
    inputs = [encoded(llm, record.prompt, templated) for record in prompts]
    for prompt, record in zip(inputs, prompts, strict=True):
        if record.prediction is not None:
            prompt["prediction"] = record.prediction
    return Inputs(inputs, templated)


def run_bench(
    llm: LLM,
    prompts: Sequence[PromptRecord],
    inputs: Inputs,
    plan: Plan,
    others: Mapping[str, Mode] | None = None,
) -> BenchRun:
    """Measures an engine that has a drafter.

    Args:
        inputs: `prompts` from `encode_all`.
        plan: `progress` is called with (runs done, runs in all).
        others: further modes by name, which take turns with the two.

    Raises `RequestError` before anything is measured when a prompt does not fit.
    """
    _check_fit(llm, inputs, plan.params)
    modes: dict[str, Mode] = {
        BASELINE: _engine_mode(llm, inputs.prompts, plan.params, 0),
        SPECULATIVE: _engine_mode(llm, inputs.prompts, plan.params, None),
        **(others or {}),
    }
    groups = [range(first, min(first + plan.batch, len(prompts))) for first in range(0, len(prompts), plan.batch)]
    for mode in modes.values():
        mode(groups[0])  # the first run of each allocates and warms caches; it is not counted
    load_peak = process_peak()
    rounds: dict[str, list[Round]] = {name: [] for name in modes}
    done = 0
    for number in range(plan.rounds):
        for name in modes:
            rounds[name].append(Round())
        for place, group in enumerate(groups):
            # Each mode comes first equally often.
            turn = (number + place) % len(modes)
            names = list(modes)
            for name in names[turn:] + names[:turn]:
                # Another model in the process would be counted as ours.
                _measure(llm, modes[name], group, rounds[name][-1], with_memory=not others)
                done += 1
                if plan.progress is not None:
                    plan.progress(done, plan.rounds * len(groups) * len(modes))
    promise = promise_of(llm, plan.params)
    ids = inputs.token_ids
    return BenchRun(
        prompts=prompts,
        prompt_ids=ids,
        rounds=rounds,
        promise=promise,
        differences=_differences(llm, ids, rounds) if promise != "none" else {},
        load_peak=load_peak,
        forward=forward_cost(llm.model),
        params=plan.params,
        batch=plan.batch,
        chat_template=inputs.chat_template,
    )


def promise_of(llm: LLM, params: SamplingParams) -> Promise:
    """What speculation owes plain decoding on the same engine.

    `identical`: every token, when decoding is greedy, or seeded with coupled verification, which draws the same
    noise either way; in float32, and wherever a token's logits have the same bits whatever else is in the
    forward. `near_ties`: the same in bfloat16 where a forward of another width rounds differently. `none`: only
    the distribution, so single outputs are not compared.
    """
    speculative = llm.config.speculative
    verification = speculative.verification if speculative is not None else None
    coupled = params.seed is not None and verification in (None, "coupled")
    if params.temperature > 0 and not coupled:
        return "none"
    exact = llm.config.dtype == "float32" or llm.model.is_row_invariant
    return "identical" if exact else "near_ties"


def _differences(
    llm: LLM, prompt_ids: Sequence[Sequence[int]], rounds: Mapping[str, Sequence[Round]]
) -> dict[str, Disagreement]:
    """Each other mode against the baseline's first round, in whichever round it differs first."""
    outputs = {name: [_tokens(each) for each in list_of_rounds] for name, list_of_rounds in rounds.items()}
    reference = outputs[BASELINE][0]
    found: dict[str, Disagreement] = {}
    for name, answers in outputs.items():
        for answer in answers:
            where = first_difference(reference, answer)
            if where is not None and name not in found:
                margin = logit_margin(llm.model, prompt_ids[where.prompt], reference[where.prompt], where)
                found[name] = Disagreement(where, margin)
    return found


def _tokens(measured: Round) -> list[list[int]]:
    return [sample.token_ids for sample in sorted(measured.samples, key=lambda sample: sample.prompt)]


def _check_fit(llm: LLM, inputs: Inputs, params: SamplingParams) -> None:
    longest = llm.model.config.max_model_len
    for number, ids in enumerate(inputs.token_ids, start=1):
        if len(ids) + (params.max_tokens or 1) > longest:
            raise RequestError(
                f"prompt {number}: its {len(ids)} tokens and --max-tokens {params.max_tokens} exceed the "
                f"context of {longest} tokens"
            )


def _engine_mode(llm: LLM, inputs: Sequence[Mapping[str, Any]], params: SamplingParams, gamma: int | None) -> Mode:
    def run(group: Sequence[int]) -> list[Sample]:
        outputs = llm.generate([inputs[index] for index in group], params, num_speculative_tokens=gamma)
        samples = []
        for index, output in zip(group, outputs, strict=True):
            if output.error is not None:
                raise RequestError(f"prompt {index + 1}: {output.error}")
            latency, ttft = output.times.latency, output.times.ttft
            assert latency is not None
            assert ttft is not None
            samples.append(Sample(index, output.outputs[0].token_ids, latency, ttft, output.stats))
        return samples

    return run


def _measure(llm: LLM, mode: Mode, group: Sequence[int], into: Round, *, with_memory: bool) -> None:
    llm.reset_stats()
    llm.reset_prefix_cache()  # the modes take turns on the same prompts, and each is to compute them
    device = llm.model.device
    reset_peak(device)
    start = perf_counter()
    samples = mode(group)
    into.seconds += perf_counter() - start
    into.samples += samples
    if with_memory:
        into.peak_memory = max(into.peak_memory, peak_memory(device))
    into.times = _added(into.times, llm.times)


def _added(left: StepTimes, right: StepTimes) -> StepTimes:
    total = replace(left, num_steps=left.num_steps + right.num_steps)
    for phase in PHASES:
        setattr(total, phase, getattr(left, phase) + getattr(right, phase))
    return total
