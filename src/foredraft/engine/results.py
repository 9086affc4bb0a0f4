"""From finished requests to what the caller sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foredraft.engine.outputs import CompletionOutput, RequestOutput, RequestTimes
from foredraft.engine.request import Request
from foredraft.engine.stats import AcceptanceStats
from foredraft.sampling.logprobs import Logprob
from foredraft.sampling.params import SamplingParams


@dataclass(frozen=True)
class Assembled:
    """The requests of one prompt, and what is needed to report on them together."""

    prompt: str | None
    params: SamplingParams
    requests: list[Request]
    tokenizer: Any

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return all(request.finished for request in self.requests)

    def output(self) -> RequestOutput:
        """The prompt's completions so far, the `n` best when `best_of` asked for more."""
        requests = self.requests
        stats = AcceptanceStats()
        for request in requests:
            stats.add(request.stats)
        chosen = best(requests, self.params.n)
        errors = [request.error for request in requests if request.error]
        first = requests[0]
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.prompt,
            prompt_token_ids=first.token_ids[: first.num_prompt_tokens],
            outputs=[self._completion(index, request) for index, request in enumerate(chosen)],
            finished=self.finished,
            stats=stats,
            times=RequestTimes(first.arrival, _earliest(requests), _latest(requests), first.started_at),
            prompt_logprobs=self._with_text(first.prompt_logprobs) if self.params.prompt_logprobs is not None else None,
            error=errors[0] if errors else None,
            num_cached_tokens=first.num_cached_tokens,
        )

    def _completion(self, index: int, request: Request) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=request.detokenizer.text if request.detokenizer else "",
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            origins=request.origins,
            cumulative_logprob=_cumulative(request) if self.params.logprobs is not None else None,
            logprobs=self._with_text(request.logprobs) if self.params.logprobs is not None else None,
        )

    def _with_text(self, entries: Sequence[dict[int, Logprob] | None]) -> list[Any]:
        """The entries with each token's text filled in."""
        if self.tokenizer is None:
            return list(entries)
        return [
            None
            if entry is None
            else {
                token: replace(logprob, decoded_token=self.tokenizer.decode([token], skip_special_tokens=False))
                for token, logprob in entry.items()
            }
            for entry in entries
        ]


def best(requests: Sequence[Request], count: int) -> Sequence[Request]:
    """The `count` completions with the most probable text; the given order when all are wanted."""
    if count == len(requests):
        return requests
    return sorted(requests, key=_cumulative, reverse=True)[:count]


def _cumulative(request: Request) -> float:
    """Sum of the output tokens' log-probabilities."""
    tokens = zip(request.output_token_ids, request.logprobs, strict=True)
    return sum(entry[token].logprob for token, entry in tokens)


def _earliest(requests: Sequence[Request]) -> float | None:
    return min((request.first_token_at for request in requests if request.first_token_at is not None), default=None)


def _latest(requests: Sequence[Request]) -> float | None:
    times = [request.finished_at for request in requests]
    return None if None in times else max(time for time in times if time is not None)
