"""`foredraft audit`: is speculation lossless on this model and drafter?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.command import EXIT_FINDING
from foredraft.cli.console import loaded_llm, progress, stdout, write_json
from foredraft.cli.flags import SAMPLING, EngineFlags, JsonPath, ModelTag, SpeculativeFlags, given_fields
from foredraft.config import require
from foredraft.measure.prompts import demo_prompts, read_prompts

AUDIT = "Audit"


@dataclass(frozen=True)
class AuditFlags:
    """What is looked at, and how much of it."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with a prompt key, or text; a dozen come along.", rich_help_panel=AUDIT),
    ] = None
    max_tokens: Annotated[int, typer.Option(min=2, help="Of each greedy output.", rich_help_panel=AUDIT)] = 64
    samples: Annotated[int, typer.Option(min=20, help="Sampled outputs.", rich_help_panel=AUDIT)] = 160
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test", help="Put faults into the engine and show that they are found.", rich_help_panel=AUDIT
        ),
    ] = False


@dataclass(frozen=True)
class AuditSamplingFlags:
    """The distribution that is audited."""

    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampled checks.", rich_help_panel=SAMPLING)] = 1.0
    top_p: Annotated[float | None, typer.Option(help="Nucleus.", rich_help_panel=SAMPLING)] = None
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens kept.", rich_help_panel=SAMPLING)] = None
    min_p: Annotated[float | None, typer.Option(help="Least share of the top token.", rich_help_panel=SAMPLING)] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 avoids repeats.", rich_help_panel=SAMPLING)
    ] = None


def audit(
    run: AuditFlags,
    engine: EngineFlags,
    speculation: SpeculativeFlags,
    sampling: AuditSamplingFlags,
    model_tag: ModelTag = None,
    json_path: JsonPath = None,
) -> int:
    """Check that speculation changes nothing: greedy and seeded tokens, sampled distributions, log-probabilities."""
    speculative = speculation.config()
    if not speculation.adaptive:
        # Lengths that adapt park a bad drafter, and a drafter that does not draft shows no fault.
        explains = speculative.explain_lengths is not None
        require(not explains, "--explain-lengths: an audit drafts at full length; add --adaptive")
        speculative = replace(speculative, adaptive=False)
    config = engine.named(model_tag).config(speculative)
    records = demo_prompts() if run.prompts is None else read_prompts(run.prompts)

    from foredraft.measure.audit import AuditPlan, run_audit, self_test
    from foredraft.measure.audit_report import print_audit
    from foredraft.measure.bench import encode_all
    from foredraft.sampling.params import SamplingParams

    plan = AuditPlan(SamplingParams(**given_fields(sampling)), max_tokens=run.max_tokens, num_samples=run.samples)
    llm = loaded_llm(config)
    inputs = encode_all(llm, records, None)
    with progress("auditing") as report:
        work = self_test if run.self_test else run_audit
        result = work(llm, inputs.prompts, plan, report)
    figures = {
        "model": config.model,
        "drafter": llm.drafter_name,
        "dtype": config.dtype,
        "lossless": result.lossless,
        "checks": [asdict(check) for check in result.checks],
        "not_covered": result.not_covered,
    }
    if json_path is not None:
        write_json(figures, json_path)
    if json_path is None or str(json_path) != "-":
        print_audit(result, stdout(), self_test=run.self_test)
    return 0 if result.lossless else EXIT_FINDING
