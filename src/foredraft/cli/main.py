"""The `foredraft` command. Nothing heavy is imported before a command has checked its flags."""

from __future__ import annotations

from typing import Annotated

import typer

from foredraft import __version__
from foredraft.cli.audit import audit
from foredraft.cli.bench import bench
from foredraft.cli.chat import chat
from foredraft.cli.command import run, with_flag_groups
from foredraft.cli.generate import generate
from foredraft.cli.serve import serve
from foredraft.cli.train import train

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foredraft {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Large language models decoded faster without changing what they say."""


for command in (serve, generate, chat, bench, audit, train):
    app.command()(with_flag_groups(command))


def main() -> int:
    """Entry point; returns the exit status."""
    return run(app)
