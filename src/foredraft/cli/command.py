"""What every command shares: flag groups, and how errors leave the process.

Exit status: 0 fine, 1 a finding, 2 wrong usage, 70 a bug of ours, 130 interrupted, 141 the reader went away.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, get_type_hints

import typer

from foredraft.errors import ForedraftError

EXIT_FINDING = 1
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
DEBUG_VARIABLE = "FOREDRAFT_DEBUG"

# Typer exports this class alone; its first base is the parent of all usage errors.
UsageError: Any = typer.BadParameter.__bases__[0]


class _ReaderGoneError(Exception):
    """Nobody reads what the command prints."""


def with_flag_groups(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes each parameter that is a dataclass of flags one flag per field, in the order of the fields.

    The command itself receives the groups whole, so that a group is declared once for all commands.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        group = hints[name]
        if not dataclasses.is_dataclass(group):
            parameters.append(parameter.replace(annotation=group))
            continue
        groups[name] = group
        field_hints = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field_hints[field.name],
            )
            for field in dataclasses.fields(group)
        ]

    @functools.wraps(function)
    def command(**flags: Any) -> Any:
        for name, group in groups.items():
            flags[name] = group(**{field.name: flags.pop(field.name) for field in dataclasses.fields(group)})
        try:
            return function(**flags)
        except BrokenPipeError as error:
            raise _ReaderGoneError from error  # Typer would exit 1, which means a finding here

    ordered = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return command


def run(app: typer.Typer, arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit status; prints every error as one line, never a traceback."""
    try:
        status = app(args=arguments, prog_name="foredraft", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except UsageError as error:
        if not error.format_message():  # no command: its help was printed
            return EXIT_USAGE
        context = error.ctx.command_path if error.ctx else "foredraft"
        return _fail(f"{error.format_message()} (see {context} --help)", EXIT_USAGE)
    except ForedraftError as error:
        return _fail(str(error), EXIT_USAGE)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED  # reached in our own lines only; Typer turns it into the same status
    except (BrokenPipeError, _ReaderGoneError):
        # Python flushes stdout once more at exit; with nobody reading, that would print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        told = " ".join(str(error).split())
        return _fail(
            f"unexpected {type(error).__name__}: {told} (a bug; {DEBUG_VARIABLE}=1 shows the traceback)",
            EXIT_BUG,
        )


def _fail(message: str, status: int) -> int:
    print(f"foredraft: error: {message}", file=sys.stderr)
    return status
