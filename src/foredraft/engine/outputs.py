"""What a caller gets back, in the shape that users of vLLM know."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foredraft.engine.stats import AcceptanceStats


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt.

    Args:
        finish_reason: `stop`, `length` or `error`.
        stop_reason: the stop string or stop token id that ended it; None for EOS and for other reasons.
        origins: how each token came about: `a` accepted draft, `r` recovered, `b` bonus, `t` target without draft.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Any]] | None = None
    origins: str = ""


@dataclass(frozen=True)
class RequestTimes:
    """Seconds on one clock (`time.perf_counter`), from the arrival of a request to its last token."""

    arrival: float
    first_token: float | None = None
    finished: float | None = None
    started: float | None = None

    @property
    def queued(self) -> float | None:
        """Seconds from arrival to its first step."""
        return _between(self.arrival, self.started)

    @property
    def prefill(self) -> float | None:
        """Seconds from its first step to the first token."""
        return _between(self.started, self.first_token)

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last."""
        return _between(self.first_token, self.finished)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return _between(self.arrival, self.first_token)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last token."""
        return _between(self.arrival, self.finished)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its completions; `error` says why when a request failed on its own.

    `num_cached_tokens` of the prompt had been computed for others before; None until it has started.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    stats: AcceptanceStats
    times: RequestTimes
    prompt_logprobs: list[dict[int, Any] | None] | None = None
    error: str | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True)
class StreamedText:
    """A piece of a streamed completion: whole characters only, never the start of a stop string.

    `token_ids` are the tokens committed since the piece before, `origins` as in `CompletionOutput`.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    origins: str = ""
    output: RequestOutput | None = None
