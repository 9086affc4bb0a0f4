"""One choice of a chat answer: what is shown of it as OpenAI's deltas, and all its deltas as a message.

An answer that is not streamed is put together from the deltas that a stream would have had, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foredraft.serve.answers import origins
from foredraft.serve.choice_text import Shown, ShownToken
from foredraft.serve.logprobs import chat_logprobs
from foredraft.serve.tools import CallArguments, CallStart, Content, Event, ToolReader


class ChatChoice:
    """Makes the deltas of one choice.

    Args:
        reader: tells tool calls from content; None where there are no tools.
        top_logprobs: most probable tokens told at each place; None for no log-probabilities.
        with_origins: whether chunks tell the origin of their text.
    """

    def __init__(
        self, index: int, reader: ToolReader | None, tokenizer: Any, top_logprobs: int | None, with_origins: bool
    ) -> None:
        self._index = index
        self._reader = reader
        self._tokenizer = tokenizer
        self._top = top_logprobs
        self._with_origins = with_origins
        self._begun = False
        self._tokens: list[ShownToken] = []  # shown, but not told with a delta yet

    def feed(self, shown: Shown) -> list[dict[str, Any]]:
        """The choices of the chunks that tell what is new."""
        deltas: list[dict[str, Any]] = []
        if not self._begun:
            self._begun = True
            deltas.append({"role": "assistant", "content": ""})
        finished = shown.finish_reason is not None
        self._tokens += shown.tokens
        events: list[Event] = [Content(shown.text)] if shown.text else []
        if self._reader is not None:
            events = self._reader.feed(shown.text, finished)
        deltas += [_delta(event) for event in events]
        choices = [self._choice(delta) for delta in deltas]
        if self._top is not None and events and self._tokens:
            choices[-1]["logprobs"] = self._logprobs()
        if finished:
            last = self._choice({})
            last["finish_reason"] = self._reason(shown.finish_reason)
            if self._top is not None and self._tokens:
                last["logprobs"] = self._logprobs()
            choices.append(last)
        if self._with_origins and (shown.tokens or shown.draft_lengths):
            choices = choices or [self._choice({})]
            choices[-1] |= origins(shown)
        return choices

    def whole(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The choice of an answer that is not streamed, from all its deltas."""
        content: str | None = ""
        calls: list[dict[str, Any]] = []
        logprobs: list[Any] = []
        for choice in choices:
            delta = choice["delta"]
            content = (content or "") + delta.get("content", "")
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
            if choice["logprobs"] is not None:
                logprobs += choice["logprobs"]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        return {
            "index": self._index,
            "message": message,
            "logprobs": None if self._top is None else {"content": logprobs, "refusal": None},
            "finish_reason": choices[-1]["finish_reason"] if choices else None,
        }

    def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _reason(self, reason: str | None) -> str | None:
        called = self._reader is not None and self._reader.num_calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _logprobs(self) -> dict[str, Any]:
        assert self._top is not None
        told, self._tokens = self._tokens, []
        return chat_logprobs(told, self._top, self._tokenizer)


def _delta(event: Event) -> dict[str, Any]:
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.call_id, "type": "function", "function": function}]}
    assert isinstance(event, CallArguments)
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
