"""From finished requests to what the caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from foredraft.engine.request import Request
from foredraft.engine.stats import AcceptanceStats
from foredraft.sampling.params import SamplingParams


@dataclass(frozen=True)
class Assembled:
    """The requests of one prompt, and what is needed to report on them together."""

    prompt: str | None
    params: SamplingParams
    requests: list[Request]
    tokenizer: Any

    def output(self) -> RequestOutput:
        """The prompt's completions so far, the `n` best when `best_of` asked for more."""
        requests = self.requests
        stats = AcceptanceStats()
        for request in requests:
            stats.add(request.stats)
        chosen = _best(requests, self.params.n)
        errors = [request.error for request in requests if request.error]
        first = requests[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[self._completion(index, request) for index, request in enumerate(chosen)],
            finished=all(request.finished for request in requests),
            stats=stats,
            times=RequestTimes(first.arrival, _earliest(requests), _latest(requests)),
            error=errors[0] if errors else None,
        )

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=request.detokenizer.text if request.detokenizer else "",
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            origins=request.origins,
        )


def _best(requests: Sequence[Request], count: int) -> Sequence[Request]:
    return requests[:count]


def _earliest(requests: Sequence[Request]) -> float | None:
    return min((request.first_token_at for request in requests if request.first_token_at is not None), default=None)


def _latest(requests: Sequence[Request]) -> float | None:
    times = [request.finished_at for request in requests]
    return None if None in times else max(time for time in times if time is not None)
