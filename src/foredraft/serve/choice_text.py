"""What leaves the server of one choice: text that the guards let go, and the tokens that belong to it.

A token is told of (its log-probability, its origin) with its text and not before: neither the start of a stop string
nor that of a blocked phrase is shown by way of its tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from foredraft.engine.answer_stream import Piece
from foredraft.sampling.logprobs import Logprob
from foredraft.serve.guards import Guard, Watch


@dataclass(frozen=True)
class ShownToken:
    """A token whose text is shown; `start` is where in the choice's text that begins."""

    token_id: int
    text: str
    start: int
    origin: str
    logprobs: dict[int, Logprob] | None


@dataclass(frozen=True)
class Shown:
    """What is new of a choice.

    `draft_lengths` are the draft tokens verified in each step since. `tail` is text of a token that was cut by a stop
    string, with its origin: part of `text`, but of no token.
    """

    text: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    finish_reason: str | None = None
    draft_lengths: list[int] = field(default_factory=list)
    tail: tuple[str, str] | None = None


class ChoiceText:
    """Follows one choice.

    Args:
        guard: watches its text; None for none.
    """

    def __init__(self, guard: Guard | None) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.blocked = False
        self._watch: Watch | None = guard.watch() if guard else None
        self._text = ""
        self._num_shown = 0
        self._last_end = 0
        self._waiting: deque[tuple[int, int, int, str, dict[int, Logprob] | None]] = deque()

    def feed(self, piece: Piece) -> Shown:
        """Takes the next piece; once the guard has blocked the choice, nothing more is shown of it."""
        self.num_tokens += len(piece.token_ids)
        if self.finish_reason is not None:
            return Shown()
        finished = piece.finish_reason is not None
        self._text += piece.text
        self._queue(piece)
        allowed = len(self._text)
        if self._watch is not None:
            allowed, self.blocked = self._watch.see(piece.text, finished)
        if self.blocked:
            self.finish_reason = "content_filter"
        else:
            self.finish_reason = piece.finish_reason
        if self.finish_reason is not None:
            self._text = self._text[:allowed]
        begin, self._num_shown = self._num_shown, max(self._num_shown, allowed)
        tokens = self._released()
        tail = None
        if self.finish_reason is not None and self._waiting and self._waiting[0][1] < self._num_shown:
            _, start, _, origin, _ = self._waiting[0]
            tail = (self._text[start:], origin)
        text = self._text[begin : self._num_shown]
        return Shown(text, tokens, self.finish_reason, piece.draft_lengths, tail)

    def _queue(self, piece: Piece) -> None:
        ended = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
        count = len(piece.token_ids) - ended  # the token that ended the text is no part of it
        for place in range(count):
            end = piece.ends[place] if piece.ends else self._last_end
            entry = piece.logprobs[place] if piece.logprobs else None
            self._waiting.append((piece.token_ids[place], self._last_end, end, piece.origins[place], entry))
            self._last_end = end

    def _released(self) -> list[ShownToken]:
        tokens = []
        while self._waiting and self._waiting[0][2] <= self._num_shown:
            token_id, start, end, origin, entry = self._waiting.popleft()
            tokens.append(ShownToken(token_id, self._text[start:end], start, origin, entry))
        return tokens
