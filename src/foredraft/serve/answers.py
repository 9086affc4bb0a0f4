"""The answers to one HTTP request: its prompts run, its choices followed, its tokens counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from time import perf_counter, time
from typing import Any
from uuid import uuid4

from foredraft.engine.answer_stream import AnswerStream, Piece
from foredraft.engine.stats import AcceptanceStats
from foredraft.errors import ContextLengthError
from foredraft.sampling.params import SamplingParams
from foredraft.serve.choice_text import ChoiceText, Shown
from foredraft.serve.errors import ApiError
from foredraft.serve.params import draft_length
from foredraft.serve.protocol import ChatBody, GenerationBody
from foredraft.serve.state import ServerState
from foredraft.serve.streaming import merged


@dataclass
class Answers:
    """What is coming for one request.

    Choice c of prompt p has index `p * n + c`.
    """

    server: ServerState
    model: str
    params: SamplingParams
    streams: Sequence[AnswerStream]
    prefix: str
    began: float
    created: int = field(default_factory=lambda: int(time()))
    request_id: str = ""
    choices: list[ChoiceText] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)

    def __post_init__(self) -> None:
        self.request_id = f"{self.prefix}-{uuid4().hex}"
        self.choices = [ChoiceText(self.server.guard) for _ in range(self.num_choices)]

    @property
    def num_choices(self) -> int:
        return len(self.streams) * self.params.n

    async def shown(self) -> AsyncIterator[tuple[int, Shown]]:
        """What is new, choice by choice; raises `ApiError` when one of them fails."""
        async with aclosing(merged(self.streams)) as pieces:  # type: ignore[type-var]
            async for place, piece in pieces:
                index = place * self.params.n + piece.index
                choice = self.choices[index]
                if piece.finish_reason == "error":
                    raise ApiError(500, _reason(self.streams[place]))
                if piece.finish_reason == "abort" and choice.finish_reason is None:
                    raise ApiError(503, "the server shut down before this answer was complete", code="shutting_down")
                was_blocked = choice.blocked
                shown = choice.feed(piece)
                if choice.blocked and not was_blocked:
                    self.server.metrics.blocked_outputs.inc()
                    self.streams[place].abort(piece.index)
                if piece.output is not None:
                    self._finished(place, piece)
                yield index, shown

    def _finished(self, place: int, piece: Piece) -> None:
        assert piece.output is not None
        self.stats.add(piece.output.stats)
        n = self.params.n
        reasons = [choice.finish_reason or "abort" for choice in self.choices[place * n : place * n + n]]
        requests = self.streams[place].assembled.requests
        self.server.metrics.finished(piece.output, reasons, [request.num_output_tokens for request in requests])

    def head(self, kind: str) -> dict[str, Any]:
        """The fields that every answer and chunk begins with."""
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.server.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Tokens and speculation of the whole request."""
        requests = [request for stream in self.streams for request in stream.assembled.requests]
        prompt = sum(len(stream.prompt_token_ids) for stream in self.streams)
        generated = sum(request.num_output_tokens for request in requests)
        cached = sum(stream.assembled.requests[0].num_cached_tokens or 0 for stream in self.streams)
        stats, speculative = self.stats, self.server.llm.config.speculative
        predicted = speculative is not None and speculative.method == "prediction"
        accepted = stats.num_accepted_tokens if predicted else 0
        rejected = stats.num_draft_tokens - stats.num_accepted_tokens if predicted else 0
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
                "reasoning_tokens": 0,
            },
            "total_time": perf_counter() - self.began,
            "speculation": {
                "steps": stats.num_steps,
                "draft_tokens": stats.num_draft_tokens,
                "accepted_tokens": stats.num_accepted_tokens,
                "acceptance_rate": stats.acceptance_rate,
                "mean_acceptance_length": stats.mean_acceptance_length,
            },
        }


def _as_sent(error: ContextLengthError, body: GenerationBody) -> ContextLengthError:
    """The error with the limit under the name that the client gave it."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return ContextLengthError(str(error).replace("max_tokens", "max_completion_tokens"))
    return error


def _reason(stream: AnswerStream) -> str:
    return next((request.error for request in stream.assembled.requests if request.error), "the request failed")


@asynccontextmanager
async def running(
    server: ServerState,
    body: GenerationBody,
    prompts: Sequence[Mapping[str, Any] | str],
    params: SamplingParams,
    *,
    model: str,
    prefix: str,
    began: float,
) -> AsyncIterator[Answers]:
    """Runs prompts; leaving the context takes what is unfinished out of the engine's next step.

    Raises `ApiError` when there is no room, and what `AsyncEngine.submit` raises.
    """
    with server.admitted(len(prompts) * max(params.n, params.best_of or 0)):
        streams: list[AnswerStream] = []
        try:
            for prompt in prompts:
                try:
                    stream = await server.engine.submit(
                        prompt, params, num_speculative_tokens=draft_length(body), priority=body.priority
                    )
                except ContextLengthError as error:
                    raise _as_sent(error, body) from None
                streams.append(stream)
                server.metrics.started(len(streams[-1].prompt_token_ids))
            yield Answers(server, model, params, streams, prefix, began)
        finally:
            for stream in streams:
                if not stream.over:
                    server.metrics.aborted(len(stream.assembled.requests))
                    stream.abort()


def origins(shown: Shown) -> dict[str, Any]:
    """What is new token by token with its origin, and the length of each step's draft: our extension for the web page.

    Origins are `a` accepted, `r` recovered, `b` bonus, `t` the target's without a draft.
    """
    told = [(token.text, token.origin) for token in shown.tokens]
    told += [shown.tail] if shown.tail else []
    spans = [{"text": text, "origin": origin} for text, origin in told]
    return {"spans": spans, "draft_lengths": shown.draft_lengths}
