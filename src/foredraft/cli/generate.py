"""`foredraft generate`: completes prompts; one is streamed, several run together."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foredraft.cli.command import EXIT_USAGE
from foredraft.cli.console import loaded_llm, note, progress, write_json
from foredraft.cli.flags import (
    SAMPLING,
    EngineFlags,
    JsonPath,
    SamplingFlags,
    SpeculationSwitch,
    SpeculativeFlags,
    given_fields,
)
from foredraft.config import SpeculativeConfig, require
from foredraft.measure.prompts import PromptRecord, read_prompts, read_text

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.engine.outputs import RequestOutput
    from foredraft.sampling.params import SamplingParams


@dataclass(frozen=True)
class PromptFlags:
    """Where the prompts come from."""

    prompt_file: Annotated[
        Path | None, typer.Option(help="JSON lines with a prompt key, or text with one prompt a line.")
    ] = None
    prediction_file: Annotated[
        Path | None, typer.Option(help="The text that the answer will resemble, for --method prediction.")
    ] = None

    def records(self, given: list[str]) -> list[PromptRecord]:
        """The prompts of the command line, of the file, or else of stdin, which is one prompt."""
        require(not (given and self.prompt_file), "give prompts as arguments or as --prompt-file, not both")
        if self.prompt_file is not None:
            records = read_prompts(self.prompt_file)
        elif given:
            records = [PromptRecord(prompt) for prompt in given]
        else:
            require(not sys.stdin.isatty(), "no prompt: give one as an argument, as --prompt-file, or on stdin")
            records = [PromptRecord(sys.stdin.read())]
        require(all(record.prompt for record in records), "the prompt is empty; give at least one character")
        if self.prediction_file is None:
            return records
        require(
            len(records) == 1,
            "--prediction-file: it belongs to one prompt; use the key 'prediction' of a .jsonl file",
        )
        return [PromptRecord(records[0].prompt, prediction=read_text(self.prediction_file, "--prediction-file"))]


@dataclass(frozen=True)
class OutputFlags:
    """What is returned for each prompt."""

    n: Annotated[int | None, typer.Option(min=1, help="Completions; 1.", rich_help_panel=SAMPLING)] = None
    best_of: Annotated[
        int | None,
        typer.Option(min=1, help="Completions made, of which the --n best stay.", rich_help_panel=SAMPLING),
    ] = None
    logprobs: Annotated[
        int | None,
        typer.Option(min=0, help="Most probable tokens listed per position, in --json.", rich_help_panel=SAMPLING),
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option(min=0, help="The same for the prompt.", rich_help_panel=SAMPLING)
    ] = None


def generate(
    source: PromptFlags,
    engine: EngineFlags,
    speculation: SpeculativeFlags,
    switch: SpeculationSwitch,
    sampling: SamplingFlags,
    returned: OutputFlags,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Stdin when there is none.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance at the end.")] = False,
    json_path: JsonPath = None,
) -> int:
    """Complete prompts; the text of a single one is streamed."""
    config = engine.config(switch.config(speculation))
    records = source.records(prompts or [])
    _check_predictions(records, config.speculative)
    for flag in ("logprobs", "prompt_logprobs"):
        wanted = getattr(returned, flag) is not None
        require(not wanted or json_path is not None, f"--{flag.replace('_', '-')}: shown in --json only; add it")
    params = sampling.params(**given_fields(returned))
    llm = loaded_llm(config)
    inputs = [_engine_prompt(record) for record in records]
    to_stdout = json_path is None or str(json_path) != "-"
    start = perf_counter()
    if len(inputs) == 1 and params.n == 1 and (params.best_of or 1) == 1:
        outputs = [_streamed(llm, inputs[0], params, to_stdout)]
    else:
        with progress("generating") as report:
            outputs = llm.generate(inputs, params, progress=report)
        if to_stdout:
            _print_all(outputs)
    seconds = perf_counter() - start
    if json_path is not None:
        write_json(_figures(llm, outputs, seconds), json_path)
    if stats:
        note(stats_line(llm, outputs, seconds))
    failed = [output.error for output in outputs if output.error]
    for error in failed:
        note(f"foredraft: error: {error}")
    return EXIT_USAGE if failed else 0


def stats_line(llm: LLM, outputs: list[RequestOutput], seconds: float) -> str:
    """Tokens, speed and acceptance of one command, prompt processing included."""
    count = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    line = f"{count} tokens in {seconds:.2f} s, {count / seconds:.1f} tokens/s"
    if llm.drafter_name is None:
        return f"{line}, no speculation"
    rate, tau = llm.stats.acceptance_rate, llm.stats.mean_acceptance_length
    return f"{line}, acceptance rate {rate:.1%}, τ {tau:.2f} tokens per forward"


def _check_predictions(records: list[PromptRecord], speculative: SpeculativeConfig | None) -> None:
    methods = speculative.methods if speculative is not None else ()
    if any(record.prediction is not None for record in records):
        require("prediction" in methods, "a prediction was given, but nothing uses it: add --method prediction")
    else:
        require(
            methods != ("prediction",),
            "--method prediction: give the text as --prediction-file or in a .jsonl file",
        )


def _engine_prompt(record: PromptRecord) -> dict[str, str]:
    prompt = {"prompt": record.prompt}
    return prompt if record.prediction is None else {**prompt, "prediction": record.prediction}


def _streamed(llm: LLM, prompt: dict[str, str], params: SamplingParams, shown: bool) -> RequestOutput:
    output = None
    for piece in llm.stream(prompt, params):
        if shown:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        output = piece.output or output
    assert output is not None
    if shown:
        print()
    return output


def _print_all(outputs: list[RequestOutput]) -> None:
    for number, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            part = f".{completion.index + 1}" if len(output.outputs) > 1 else ""
            print(f"[{number}{part}] {completion.text}")


def _plain(logprobs: list[dict[int, Any] | None] | None) -> Any:
    if logprobs is None:
        return None
    return [each and {token: asdict(logprob) for token, logprob in each.items()} for each in logprobs]


def _figures(llm: LLM, outputs: list[RequestOutput], seconds: float) -> dict[str, Any]:
    stats = llm.stats
    speculative = llm.config.speculative
    count = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "model": llm.config.model,
        "drafter": llm.drafter_name,
        "gamma": speculative.num_speculative_tokens if speculative else 0,
        "dtype": llm.config.dtype,
        "new_tokens": count,
        "seconds": seconds,
        "tokens_per_second": count / seconds,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_rate_per_position": stats.acceptance_rate_per_position,
        "results": [
            {
                "prompt": output.prompt,
                "prompt_tokens": len(output.prompt_token_ids),
                "error": output.error,
                "ttft_s": output.times.ttft,
                "latency_s": output.times.latency,
                "mean_acceptance_length": output.stats.mean_acceptance_length,
                "acceptance_rate": output.stats.acceptance_rate,
                "prompt_logprobs": _plain(output.prompt_logprobs),
                "outputs": [asdict(completion) for completion in output.outputs],
            }
            for output in outputs
        ],
    }
