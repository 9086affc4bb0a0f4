"""What all routes share: the engine, its names and limits, and the room that is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import time
from typing import Any

from fastapi import Request

from foredraft.engine.async_engine import AsyncEngine
from foredraft.engine.llm import LLM
from foredraft.serve.embedding import Embeddings
from foredraft.serve.errors import ApiError
from foredraft.serve.guards import Guard
from foredraft.serve.metrics import Metrics
from foredraft.serve.protocol import Body
from foredraft.serve.settings import ServerSettings


@dataclass
class ServerState:
    """One server.

    Args:
        names: that clients may ask for; the first one is in answers.
        tool_style: how the model writes tool calls; None where its template knows none.
        num_admitted: sequences of requests that are being answered or prepared.
    """

    settings: ServerSettings
    llm: LLM
    engine: AsyncEngine
    metrics: Metrics
    guard: Guard | None
    names: tuple[str, ...]
    tool_style: str | None
    embeddings: Embeddings
    version: str
    started: int = field(default_factory=lambda: int(time()))
    num_admitted: int = 0

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self.llm.max_model_len

    @property
    def reads_predictions(self) -> bool:
        """Whether drafts may come from a request's `prediction`."""
        speculative = self.llm.config.speculative
        return speculative is not None and "prediction" in speculative.methods

    @property
    def fingerprint(self) -> str:
        """Names what can change an answer: model, dtype and version."""
        return f"{self.names[0]}-{self.llm.config.dtype}-foredraft-{self.version}"

    def model_name(self, asked: str | None) -> str:
        """The name to answer under; raises a 404 for a model that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise ApiError(
                404,
                f"model: {asked[:200]!r} is not served here; served: {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        return asked

    def note_unknown(self, body: Body) -> None:
        """Counts the fields of a request that mean nothing here: a prediction that no drafter reads is one."""
        count = len(body.unknown_fields)
        if getattr(body, "prediction", None) is not None and not self.reads_predictions:
            count += 1
        self.metrics.unknown_fields.inc(count)

    def check_input(self, text: str) -> None:
        """Raises a 400 when a guard refuses the text of a request."""
        if self.guard is not None and self.guard.blocks_input(text):
            self.metrics.blocked_inputs.inc()
            raise ApiError(400, "the request's text is refused by this server's content filter", code="content_filter")

    def check_length(self, text: str, param: str) -> None:
        """Raises a 400 for text that cannot fit the context however it is tokenized, before time goes into that."""
        longest = self.max_model_len * self.llm.max_token_chars
        if len(text) > longest:
            raise ApiError(
                400,
                f"{param}: {len(text)} characters cannot fit a context of {self.max_model_len} tokens; shorten it",
                param=param,
                code="context_length_exceeded",
            )

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Room for `count` sequences; raises a 429 when too many wait already."""
        most = self.llm.config.max_num_seqs + self.settings.max_waiting
        if count > most:
            raise ApiError(400, f"n: {count} sequences in one request; this server takes at most {most}", param="n")
        if self.num_admitted + count > most:
            raise ApiError(
                429,
                f"{self.num_admitted} sequences run or wait, and this server takes at most {most}; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.num_admitted += count
        try:
            yield
        finally:
            self.num_admitted -= count


def state_of(request: Request) -> ServerState:
    """The server that a request came to."""
    state: ServerState = request.app.state.server
    return state
