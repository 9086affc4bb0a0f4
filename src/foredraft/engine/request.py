"""A request: its tokens, its place in the KV cache, and how far both are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

from foredraft.engine.detokenizer import Detokenizer
from foredraft.engine.stats import AcceptanceStats
from foredraft.sampling.logprobs import Logprob
from foredraft.sampling.params import SamplingParams
from foredraft.sampling.state import SamplingState


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)  # a request is itself; queues look it up by identity
class Request:
    """One sequence being generated.

    `num_logprobs` is how many log-probabilities to keep of each output token beside its own, None for none at all.
    `token_ids` holds prompt and output; the target's KV cache holds `num_computed_tokens` of them. Between steps of a
    decoding request that is all but the last, the anchor. A lower `priority` is served first; `order` is the place in
    which the scheduler got the request. `block_hashes` name its full blocks of text, of which `num_published_blocks`
    can be found by others; `num_cached_tokens` of its first tokens were found when it started. `draft_lengths` are the
    draft tokens verified in each of its steps.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    state: SamplingState
    max_tokens: int
    detokenizer: Detokenizer | None
    stop_token_ids: frozenset[int]
    eos_token_ids: frozenset[int]
    prediction: Sequence[int] = ()
    num_logprobs: int | None = None
    max_draft_tokens: int | None = None
    priority: int = 0
    order: int = 0
    overdue: bool = False
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0
    num_cached_tokens: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    origins: str = ""
    draft_lengths: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    arrival: float = field(default_factory=perf_counter)
    started_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose KV is not in the cache yet: 1 while decoding, more during prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def rank(self) -> tuple[int, int, int]:
        """Its place among requests that compete; the lowest is served first and preempted last."""
        return (0, 0, self.order) if self.overdue else (1, self.priority, self.order)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's log-probabilities are asked for and not complete."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens that may still come."""
        return self.max_tokens - self.num_output_tokens

    @property
    def finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def start(self) -> None:
        """Marks the request running; the time of the first start is kept."""
        self.status = RequestStatus.RUNNING
        if self.started_at is None:
            self.started_at = perf_counter()

    def mark_first_token(self) -> None:
        """Notes the time of the first output token, now."""
        self.first_token_at = perf_counter()

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """Marks the request finished, now."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finished_at = perf_counter()
