"""`foredraft chat`: a conversation through the model's chat template, kept until `/reset` or `/exit`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from foredraft.cli.console import loaded_llm, note
from foredraft.cli.flags import EngineFlags, SamplingFlags, SpeculationSwitch, SpeculativeFlags
from foredraft.cli.generate import stats_line
from foredraft.config import require
from foredraft.errors import RequestError

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.sampling.params import SamplingParams

HELP = "/exit leaves, /reset forgets the conversation, Ctrl-C stops an answer"


def chat(
    engine: EngineFlags,
    speculation: SpeculativeFlags,
    switch: SpeculationSwitch,
    sampling: SamplingFlags,
    system: Annotated[str | None, typer.Option(help="The system message of the conversation.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and acceptance after each answer.")] = False,
) -> int:
    """Talk with a model; it sees the whole conversation."""
    config = engine.config(switch.config(speculation))
    require(
        config.speculative is None or config.speculative.method != "prediction",
        "--method prediction: a conversation has no predicted text; use another method",
    )
    # An answer may be as long as the context lasts, unless a limit was asked for.
    params = sampling.params(**({"max_tokens": None} if sampling.max_tokens is None else {}))
    llm = loaded_llm(config)
    require(
        bool(llm.tokenizer.chat_template),
        f"{config.model}: the model has no chat template; use foredraft generate",
    )
    start = [] if system is None else [{"role": "system", "content": system}]
    messages = list(start)
    note(HELP)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
            note("the conversation is forgotten")
        elif line.startswith("/"):
            note(f"unknown command {line.split()[0]}; {HELP}")
        elif line:
            _answer(llm, messages, line, params, stats)
    return 0


def _answer(llm: LLM, messages: list[dict[str, str]], line: str, params: SamplingParams, stats: bool) -> None:
    """Streams one answer and adds it with its question to the conversation, also when it was stopped."""
    asked = [*messages, {"role": "user", "content": line}]
    text, output = "", None
    llm.reset_stats()
    begin = perf_counter()
    try:
        with _stop_on_interrupt() as stopped:
            for piece in llm.stream_chat(asked, params):
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                text += piece.text
                output = piece.output
                if stopped:
                    break
    except RequestError as error:
        note(f"foredraft: error: {error}; /reset forgets the conversation")
        return
    print()
    if stopped:
        note("(stopped)")
    if output is not None and output.error:
        note(f"foredraft: error: {output.error}")
    if stats and output is not None:
        note(stats_line(llm, [output], perf_counter() - begin))
    messages[:] = [*asked, {"role": "assistant", "content": text}]


@contextmanager
def _stop_on_interrupt() -> Iterator[list[bool]]:
    """Turns the first Ctrl-C into an entry of the list yielded, so that no step is torn.

    A second one interrupts.
    """
    stopped: list[bool] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(True)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, previous)


def _lines() -> Iterator[str]:
    """What the user types, line by line, until the end of the input."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            yield input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
