"""What the server is told at its start, checked once. Knows no torch and no web framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foredraft.config import require, require_at_least, require_choice, require_integer

LOOPBACK = ("127.0.0.1", "::1", "localhost")
TOOL_CALL_PARSERS = ("hermes", "llama3_json")

MAX_N = 128
"""Choices of one prompt, as OpenAI allows."""
MAX_STOP = 4
MAX_LOGIT_BIAS = 1024
MAX_TOOLS = 128
MAX_PROMPTS = 1024
"""Prompts of one completions request, and texts of one embeddings request."""
MAX_JSON_DEPTH = 64
MAX_HEADER_BYTES = 64 * 1024
"""Of a request line and its headers together."""


@dataclass(frozen=True)
class ServerSettings:
    """How the engine is offered.

    Args:
        served_model_name: names that clients may ask for, the first one in answers; empty for the model's own.
        host, port: where to listen; port 0 takes a free one.
        api_key: keys of which clients must send one; empty for none.
        allowed_origins: web origins whose pages may call the server.
        max_waiting: sequences that may wait beside those that run; more are refused with 429.
        max_body_bytes: longest request body.
        shutdown_timeout: seconds that running requests have to finish after SIGTERM.
        guard: `module:Class` of output guards, each made without arguments.
        guard_keywords: a file with one blocked phrase a line.
        chat_template: a file that replaces the model's own template.
        tool_call_parser: how the model writes tool calls; None to tell from its template.
        enable_auto_tool_choice: the server must know how the model writes tool calls, or it does not start.
        seed: for requests that give none; None draws a new one for each.
        embedding_model: a second model for embeddings; None for the served one.
    """

    served_model_name: Sequence[str] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    max_waiting: int = 256
    max_body_bytes: int = 16 * 2**20
    shutdown_timeout: float = 30.0
    guard: Sequence[str] = ()
    guard_keywords: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool = False
    seed: int | None = None
    embedding_model: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.port <= 65535, f"port: {self.port} is not from 0 to 65535")
        require_at_least("max_waiting", self.max_waiting, 0)
        require_at_least("max_body_bytes", self.max_body_bytes, 1024)
        require(self.shutdown_timeout >= 0, f"shutdown_timeout: {self.shutdown_timeout} is below 0")
        require(all(self.api_key), "api_key: a key is empty; give text, or leave the flag out")
        require(all(self.served_model_name), "served_model_name: a name is empty")
        if self.seed is not None:
            require_integer("seed", self.seed)
            require(-(2**63) <= self.seed < 2**64, f"seed: {self.seed} is not from -2^63 to 2^64 - 1")
        if self.tool_call_parser is not None:
            require_choice("tool_call_parser", self.tool_call_parser, TOOL_CALL_PARSERS)

    @property
    def is_open(self) -> bool:
        """Whether anybody on the network may use the server."""
        return self.host not in LOOPBACK and not self.api_key
