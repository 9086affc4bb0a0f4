"""`foredraft serve`: OpenAI's API over HTTP, and a page to look at."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from foredraft import __version__
from foredraft.cli.console import loaded_llm, note
from foredraft.cli.flags import EngineFlags, SpeculationSwitch, SpeculativeFlags
from foredraft.config import require
from foredraft.errors import ConfigError
from foredraft.serve.settings import ServerSettings

SERVER = "Server"
KEY_VARIABLE = "FOREDRAFT_API_KEY"
LogLevel = Literal["debug", "info", "warning", "error"]
ToolParser = Literal["hermes", "llama3_json"]


def _use_config_file(context: typer.Context, path: str | None) -> str | None:
    """Makes what the file says the defaults of the flags, which the command line overrides."""
    if path is None or context.resilient_parsing:
        return path
    known = {name.lstrip("-"): param.name for param in context.command.params for name in param.opts}
    context.default_map = {**(context.default_map or {}), **_read_config(path, known)}
    return path


def _read_config(path: str, known: Mapping[str, str | None]) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--config {path}: cannot be read: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    require(found is None or isinstance(found, dict), f"--config {path}: expected names and values, as `port: 8000`")
    values: dict[str, Any] = {}
    for name, value in (found or {}).items():
        flag = str(name).replace("_", "-")
        if flag not in known or flag == "config":
            raise ConfigError(f"--config {path}: unknown name {name!r}; names are those of the flags, without dashes")
        target = known[flag]
        assert target is not None
        values[target] = json.dumps(value) if isinstance(value, dict) else value
    return values


@dataclass(frozen=True)
class ServerFlags:
    """How the engine is offered."""

    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name that clients ask for; repeatable.", rich_help_panel=SERVER)
    ] = None
    host: Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=SERVER)] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=SERVER)] = 8000
    api_key: Annotated[
        list[str] | None,
        typer.Option(help=f"Key that clients must send; repeatable; also ${KEY_VARIABLE}.", rich_help_panel=SERVER),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(help="Web origin whose pages may call; repeatable.", rich_help_panel=SERVER),
    ] = None
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Sequences that may wait; then 429.", rich_help_panel=SERVER)
    ] = 256
    max_body_bytes: Annotated[int, typer.Option(min=1024, help="Longest request body.", rich_help_panel=SERVER)] = (
        16 * 2**20
    )
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to finish after SIGTERM.", rich_help_panel=SERVER)
    ] = 30.0
    guard: Annotated[
        list[str] | None, typer.Option(metavar="MODULE:CLASS", help="Guard; repeatable.", rich_help_panel=SERVER)
    ] = None
    guard_keywords: Annotated[
        str | None, typer.Option(metavar="FILE", help="Blocked phrases, one a line.", rich_help_panel=SERVER)
    ] = None
    chat_template: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replaces the model's template.", rich_help_panel=SERVER)
    ] = None
    tool_call_parser: Annotated[
        ToolParser | None,
        typer.Option(help="How tool calls are written; told by the template.", rich_help_panel=SERVER),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool,
        typer.Option(
            "--enable-auto-tool-choice",
            help="Do not start unless tool calls can be read; where they can, they always are.",
            rich_help_panel=SERVER,
        ),
    ] = False
    seed: Annotated[int | None, typer.Option(help="For requests that give none.", rich_help_panel=SERVER)] = None
    embedding_model: Annotated[
        str | None, typer.Option(help="A second model, for embeddings.", rich_help_panel=SERVER)
    ] = None

    def settings(self) -> ServerSettings:
        """The server's settings, with the key of the environment; raises `ConfigError`."""
        given: dict[str, Any] = asdict(self)
        for name in ("served_model_name", "api_key", "allowed_origins", "guard"):
            given[name] = tuple(given[name] or ())
        from_environment = os.environ.get(KEY_VARIABLE)
        if from_environment and not given["api_key"]:
            given["api_key"] = (from_environment,)
        return ServerSettings(**given)


def serve(
    engine: EngineFlags,
    speculation: SpeculativeFlags,
    switch: SpeculationSwitch,
    server: ServerFlags,
    model_tag: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")] = None,
    log_level: Annotated[LogLevel, typer.Option(help="Least that is logged.", rich_help_panel=SERVER)] = "info",
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            is_eager=True,
            callback=_use_config_file,
            help="YAML with flags by name.",
            rich_help_panel=SERVER,
        ),
    ] = None,
) -> int:
    """Serve OpenAI's API, with speculation, and a web page."""
    from dataclasses import replace

    if model_tag is not None:
        require(engine.model in (EngineFlags.model, model_tag), f"--model {engine.model} contradicts {model_tag}")
        engine = replace(engine, model=model_tag)
    config = engine.config(switch.config(speculation))
    settings = server.settings()
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    from foredraft.serve.guards import load_guards

    load_guards(settings.guard, settings.guard_keywords)  # before the model loads
    from foredraft.serve.run import bind, run_server

    listening = bind(settings)
    if settings.is_open:
        note(f"foredraft: warning: --host {settings.host} lets others in; give --api-key to ask them for a key")
    try:
        from foredraft.serve.app import make_state

        llm = loaded_llm(config)
        state = make_state(llm, settings, __version__)
        if config.speculative is not None:
            gamma = config.speculative.num_speculative_tokens
            note(f"Using speculative decoding with draft model: {llm.drafter_name}, draft length: {gamma}")
        run_server(state, listening)
    finally:
        listening.close()
    return 0
