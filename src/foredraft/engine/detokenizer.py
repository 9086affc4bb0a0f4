"""Token ids to text, a few tokens at a time: whole characters only, and never the start of a stop string.

Decoding depends on neighbours (byte-level tokens, leading spaces), so each piece is the difference between two decodes
of a short window that starts where text was last complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """What detokenisation needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Turns one request's output tokens into text.

    Args:
        decoder: the tokenizer.
        prompt_token_ids: the last few give the first output token its context; none of their text is emitted.
        stop: stop strings.
        include_stop: whether a found stop string stays in the text.
        min_tokens: stop strings that end within the first `min_tokens` tokens are text like any other.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        context: int = 5,
    ) -> None:
        self._decoder = decoder
        self._skip_special = skip_special_tokens
        self._stop = [string for string in stop if string]
        self._include_stop = include_stop
        self._context = context
        self._window = list(prompt_token_ids[-context:])
        self._shown = len(self._window)  # tokens of the window whose text is already in `text`
        self._emitted = 0
        self._num_tokens = 0
        self._min_tokens = min_tokens
        self.text = ""
        self.ends: list[int] = []
        """Where in the text, before it is cut at a stop string, each token's characters end."""

    def append(self, token_id: int) -> str | None:
        """Takes the next token; returns the stop string that it completed, else None.

        After a stop string `text` ends before it (or with it, when it is to be included).
        """
        self._window.append(token_id)
        self._num_tokens += 1
        before = self._decode(self._window[: self._shown])
        after = self._decode(self._window)
        self.ends.append(len(self.text))
        if after == before:  # a token without text, a skipped special one say
            self._window = self._window[-self._context :]
            self._shown = len(self._window)
            return None
        if after.endswith(REPLACEMENT) or len(after) < len(before):
            return None  # part of a character: wait for its other bytes
        piece = after[len(before) :]
        self.ends[-1] += len(piece)
        return self._take(piece)

    def finish(self) -> str | None:
        """Takes what was held back for want of more bytes; returns a stop string if that completed one."""
        piece = self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]
        if not piece:
            return None
        self.ends[-1] += len(piece)
        return self._take(piece)

    def _take(self, piece: str) -> str | None:
        start = len(self.text)
        self.text += piece
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return self._cut_at_stop(start)

    def _cut_at_stop(self, new_from: int) -> str | None:
        """Cuts `text` at the earliest stop string that ends in the text from `new_from` on."""
        if self._num_tokens < self._min_tokens:
            return None
        found: tuple[int, int, str] | None = None
        for string in self._stop:
            at = self.text.find(string, max(new_from - len(string) + 1, 0))
            if at >= 0 and (found is None or (at + len(string), at) < found[:2]):
                found = (at + len(string), at, string)
        if found is None:
            return None
        end, at, string = found
        self.text = self.text[: end if self._include_stop else at]
        return string

    def pop_new_text(self, finished: bool) -> str:
        """Text not given out before; until `finished`, what may be the start of a stop string is held back."""
        end = len(self.text) if finished else len(self.text) - self._held_back()
        piece = self.text[self._emitted : end]
        self._emitted = max(end, self._emitted)
        return piece

    def _held_back(self) -> int:
        """Length of the longest ending of `text` that is a proper beginning of a stop string."""
        longest = max((len(string) - 1 for string in self._stop), default=0)
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(string.startswith(self.text[-size:]) for string in self._stop if len(string) > size):
                return size
        return 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(token_ids, skip_special_tokens=self._skip_special)
