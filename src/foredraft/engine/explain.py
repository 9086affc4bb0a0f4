"""`--explain-lengths`: one line a step of what was decided, what it expected, and what came."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from foredraft.engine.adaptive import StepPlan
from foredraft.engine.lengths import StepOutcome
from foredraft.errors import ConfigError

Explanation = Callable[[StepPlan, StepOutcome], None]


def explanation(path: str) -> Explanation:
    """Writes to a file, or to stderr for `-`; raises `ConfigError` when the file cannot be written."""
    if path == "-":
        return _writer(lambda: sys.stderr)
    try:
        # Open as long as the process: a line at a time, so that it can be followed.
        stream = open(path, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--explain-lengths {path}: cannot be written: {error.strerror}") from error
    return _writer(lambda: stream)


def line_of(number: int, plan: StepPlan, outcome: StepOutcome) -> str:
    """A step as text: draft tokens asked for, made and verified per request, then tokens and milliseconds."""
    came = outcome.target_seconds + outcome.rest_seconds + plan.draft_seconds
    trial = f" trial={plan.trial}" if plan.trial is not None else ""
    prefill = f" prefill={plan.num_prefill_tokens}" if plan.num_prefill_tokens else ""
    accepted = _listed([each or 0 for each in outcome.accepted])
    return (
        f"step {number}: chosen={_listed(plan.chosen)} drafted={_listed(plan.drafted)} "
        f"verified={_listed(plan.verified)} accepted={accepted}{trial}{prefill} "
        f"expected {plan.expected_tokens:.2f} tokens in {plan.expected_seconds * 1e3:.2f} ms, "
        f"came {outcome.num_emitted} in {came * 1e3:.2f} ms"
    )


def _writer(stream: Callable[[], TextIO]) -> Explanation:
    number = 0

    def explain(plan: StepPlan, outcome: StepOutcome) -> None:
        nonlocal number
        number += 1
        print(line_of(number, plan, outcome), file=stream())

    return explain


def _listed(lengths: Sequence[int]) -> str:
    return ",".join(map(str, lengths)) or "-"
