"""`foredraft bench`: plain and speculative decoding of a prompt file, measured in turns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from foredraft.cli.command import EXIT_FINDING
from foredraft.cli.console import loaded_llm, progress, write_json
from foredraft.cli.flags import SAMPLING, EngineFlags, JsonPath, ModelTag, SpeculativeFlags, given_fields
from foredraft.config import require
from foredraft.measure.prompts import demo_prompts, read_prompts

BENCH = "Bench"


@dataclass(frozen=True)
class BenchFlags:
    """What is run, and how often."""

    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON lines with a prompt key, or text; a dozen come along.", rich_help_panel=BENCH),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Times over all prompts.", rich_help_panel=BENCH)] = 3
    batch: Annotated[int, typer.Option(min=1, help="Prompts answered together.", rich_help_panel=BENCH)] = 1
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Render prompts by the model's template; if it has one.",
            rich_help_panel=BENCH,
        ),
    ] = None
    compare_transformers: Annotated[
        bool,
        typer.Option(
            "--compare-transformers",
            help="Time transformers' generate, too, in turns.",
            rich_help_panel=BENCH,
        ),
    ] = False


@dataclass(frozen=True)
class BenchSamplingFlags:
    """How tokens are chosen: greedily, unless told otherwise."""

    max_tokens: Annotated[int, typer.Option(min=1, help="Of output per prompt.", rich_help_panel=SAMPLING)] = 128
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Nucleus.", rich_help_panel=SAMPLING)] = None
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens kept.", rich_help_panel=SAMPLING)] = None
    min_p: Annotated[float | None, typer.Option(help="Least share of the top token.", rich_help_panel=SAMPLING)] = None
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=SAMPLING)] = None
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=SAMPLING)
    ] = None


def bench(
    run: BenchFlags,
    engine: EngineFlags,
    speculation: SpeculativeFlags,
    sampling: BenchSamplingFlags,
    model_tag: ModelTag = None,
    json_path: JsonPath = None,
) -> int:
    """Measure what speculation gains, in turns with plain decoding, and whether the outputs agree."""
    config = engine.named(model_tag).config(speculation.config())
    require(
        run.batch <= engine.max_num_seqs,
        f"--batch: {run.batch} is above --max-num-seqs {engine.max_num_seqs}",
    )
    require(
        not (run.compare_transformers and sampling.temperature > 0),
        "--compare-transformers: compares greedy decoding; leave --temperature at 0",
    )
    require(
        not (run.compare_transformers and run.batch > 1),
        "--compare-transformers: compares one request at a time; leave --batch at 1",
    )
    records = demo_prompts() if run.prompts is None else read_prompts(run.prompts)
    require(
        config.speculative is None
        or config.speculative.method != "prediction"
        or any(record.prediction is not None for record in records),
        "--method prediction: no prompt has a prediction; give a .jsonl file with the key 'prediction'",
    )

    from foredraft.measure.bench import TRANSFORMERS, Plan, encode_all, run_bench
    from foredraft.measure.report import bench_json, print_report
    from foredraft.sampling.params import SamplingParams

    params = SamplingParams(**given_fields(sampling))
    llm = loaded_llm(config)
    inputs = encode_all(llm, records, run.chat_template)
    others = {}
    if run.compare_transformers:
        from foredraft.measure.transformers_mode import transformers_mode

        others[TRANSFORMERS] = transformers_mode(llm, inputs.token_ids, params)
    with progress("measuring") as report:
        plan = Plan(rounds=run.rounds, batch=run.batch, params=params, progress=report)
        measured = run_bench(llm, records, inputs, plan, others)
    figures = bench_json(measured, llm)
    if json_path is not None:
        write_json(figures, json_path)
    if json_path is None or str(json_path) != "-":
        from foredraft.cli.console import stdout

        print_report(figures, measured, stdout())
    return EXIT_FINDING if measured.broken else 0
