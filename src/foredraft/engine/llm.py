"""`LLM`: prompts in, completions out, on this process's engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from foredraft.config import EngineConfig, SpeculativeConfig
from foredraft.engine.build import build_engine
from foredraft.engine.outputs import RequestOutput, StreamedText
from foredraft.engine.prompts import Prompt, RequestFactory
from foredraft.engine.results import Assembled
from foredraft.engine.stats import AcceptanceStats, StepTimes
from foredraft.errors import RequestError
from foredraft.sampling.params import SamplingParams

Progress = Callable[[int, int], None]
Messages = Sequence[Mapping[str, Any]]
Value = TypeVar("Value")


class LLM:
    """A target model with an optional drafter, for offline use.

    Args:
        model: a directory, a hub id in the local cache, a `.gguf` file, or `demo`.
        speculative: how to draft and verify; None for plain decoding on the same engine.
        progress: called with (tensors loaded, tensors in all) while weights load.
        options: the other fields of `EngineConfig`.

    Raises `ConfigError`, `ModelError` or `DrafterError`, each saying what to change.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative: SpeculativeConfig | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig(model=model, speculative=speculative, **options)
        built = build_engine(self.config, progress)
        self.engine = built.engine
        self.model = built.engine.model
        self.tokenizer = built.tokenizer
        self.drafter_name = built.drafter_name
        self.max_model_len = built.max_model_len
        self._factory = RequestFactory(self.config, built)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        verification: str | None = None,
        priority: int | Sequence[int] = 0,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Completes one prompt or a list of them; answers come in the order given.

        Args:
            prompts: text, `{"prompt_token_ids": [...]}`, or `{"prompt": text, "prediction": text}`.
            params: one for all, or one per prompt.
            num_speculative_tokens: γ for this call, at most the configured one; 0 turns speculation off.
            verification: the rule for this call; None for the configured one.
            priority: one for all, or one per prompt; lower is served first.
            progress: called with (requests finished, requests in all).

        Raises `RequestError` before anything runs when a prompt or its parameters cannot be served.
        """
        listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        assembled = [
            self._factory.assemble(prompt, chosen, num_speculative_tokens, verification, urgency)
            for prompt, chosen, urgency in zip(
                listed,
                _one_each("params", SamplingParams() if params is None else params, len(listed)),
                _one_each("priority", priority, len(listed)),
                strict=True,
            )
        ]
        self._run(assembled, progress)
        return [each.output() for each in assembled]

    def generate_as_finished(
        self, prompts: Iterable[tuple[Prompt, SamplingParams]], *, num_speculative_tokens: int | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Completes a stream of prompts, keeping the batch full; yields (place in the stream, output) as each ends.

        Prompts are taken as places come free, so a stream may be longer than memory. Closing the iterator aborts what
        runs.
        """
        incoming = enumerate(prompts)
        running: dict[int, Assembled] = {}
        try:
            while True:
                room = self.config.max_num_seqs - sum(len(each.requests) for each in running.values())
                for index, (prompt, params) in itertools.islice(incoming, max(0, room)):
                    running[index] = self._factory.assemble(prompt, params, num_speculative_tokens)
                    for request in running[index].requests:
                        self.engine.add(request)
                if not running:
                    return
                self.engine.step()
                for index in [i for i, each in running.items() if each.finished]:
                    yield index, running.pop(index).output()
        finally:
            for assembled in running.values():
                for request in assembled.requests:
                    self.engine.abort(request)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        num_speculative_tokens: int | None = None,
        progress: Progress | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, rendered by the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Sequence[Messages] = [messages] if one else messages  # type: ignore[list-item,assignment]
        prompts = [self._factory.rendered(conversation, **template_options) for conversation in conversations]
        return self.generate(prompts, params, num_speculative_tokens=num_speculative_tokens, progress=progress)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        num_speculative_tokens: int | None = None,
    ) -> Iterator[StreamedText]:
        """Completes one prompt, piece by piece; the last piece carries the whole output.

        Closing the iterator aborts the request.
        """
        assembled = self._factory.assemble(prompt, params or SamplingParams(), num_speculative_tokens)
        if len(assembled.requests) != 1:
            raise RequestError(f"n: {len(assembled.requests)} completions cannot be streamed as one text; use n=1")
        request = assembled.requests[0]
        self.engine.add(request)
        shown = 0
        try:
            while not request.finished:
                self.engine.step()
                tokens = request.output_token_ids[shown:]
                piece = request.detokenizer.pop_new_text(request.finished) if request.detokenizer else ""
                if tokens or request.finished:
                    output = assembled.output() if request.finished else None
                    yield StreamedText(piece, tokens, request.origins[shown:], output)
                shown += len(tokens)
        finally:
            self.engine.abort(request)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **template_options: Any
    ) -> Iterator[StreamedText]:
        """Answers one conversation, piece by piece."""
        return self.stream(self._factory.rendered(messages, **template_options), params)

    def assemble(
        self, prompt: Prompt, params: SamplingParams, num_speculative_tokens: int | None = None, priority: int = 0
    ) -> Assembled:
        """The requests of a prompt, checked and ready for the engine; raises `RequestError`."""
        return self._factory.assemble(prompt, params, num_speculative_tokens, priority=priority)

    def rendered(self, messages: Messages, **template_options: Any) -> dict[str, Any]:
        """A conversation as a prompt with its token ids, by the model's chat template."""
        return self._factory.rendered(messages, **template_options)

    def _run(self, assembled: Sequence[Assembled], progress: Progress | None) -> None:
        requests = [request for each in assembled for request in each.requests]
        try:
            for request in requests:
                self.engine.add(request)
            done = 0
            while done < len(requests):
                done += sum(request.finished for request in self.engine.step())
                if progress is not None:
                    progress(done, len(requests))
        finally:
            for request in requests:
                self.engine.abort(request)

    @property
    def is_row_invariant(self) -> bool:
        """Whether a token's logits have the same bits whatever else is in the forward."""
        return self.model.is_row_invariant

    @cached_property
    def max_token_chars(self) -> int:
        """Characters of the longest token: a text cannot have more of them for each of its tokens."""
        tokens = range(self.model.config.vocab_size)
        return max(len(self.tokenizer.id_to_bytes(token)) for token in tokens) if self.tokenizer else 1

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end an output."""
        return self._factory.eos_token_ids

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance over everything that this engine has decoded since `reset_stats`."""
        return self.engine.stats

    @property
    def times(self) -> StepTimes:
        """Where the steps' time went since `reset_stats`."""
        return self.engine.times

    @property
    def kv_cache_bytes_used_peak(self) -> int:
        """Bytes of the most KV-cache blocks in use at once, the draft model's included."""
        return self.engine.peak_blocks * self._factory.bytes_per_block

    def reset_prefix_cache(self) -> None:
        """Forgets what finished requests computed, so that the next ones start from nothing."""
        self.engine.scheduler.pool.forget()

    def reset_stats(self) -> None:
        """Starts counting acceptance and times anew."""
        self.engine.stats = AcceptanceStats()
        self.engine.times = StepTimes()


def _one_each(name: str, given: Value | Sequence[Value], count: int) -> Sequence[Value]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(f"{name}: {len(given)} given for {count} prompts; give one, or one per prompt")
    return given
