"""What commands show while they work, and where figures go.

What a user asked for goes to stdout, all else to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.config import EngineConfig
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from foredraft.engine.llm import LLM


def stdout() -> Console:
    """A console on stdout that keeps tables whole when nobody sets the width of a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, where that is a terminal; yields its update (done, in all)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(what, total=None)

    def update(done: int, total: int) -> None:
        bar.start()  # not before there is something to tell: short work shows no bar
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        bar.stop()


def loaded_llm(config: EngineConfig) -> LLM:
    """The engine of a configuration, with a progress bar while its weights load."""
    from foredraft.engine.llm import LLM

    options = {name: getattr(config, name) for name in config.__dataclass_fields__}
    with progress("loading weights") as report:
        return LLM(**options, progress=report)


def note(line: str) -> None:
    """A line beside the answer: on stderr."""
    print(line, file=sys.stderr, flush=True)


def write_json(figures: Mapping[str, Any], path: Path) -> None:
    """Writes figures to a file, or to stdout for `-`; raises `ConfigError` when it cannot be written."""
    text = json.dumps(figures, indent=2, ensure_ascii=False) + "\n"
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written: {error.strerror}") from error
