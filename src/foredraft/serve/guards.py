"""Guards: what must not come in, and what must not go out.

An input check sees the request's text before the engine does; an output check sees committed text only, as it grows,
and says how much of it may leave the server, so that the beginning of a blocked phrase waits for its end.
"""

from __future__ import annotations

import importlib
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from foredraft.errors import ConfigError


class Watch(Protocol):
    """One output under watch."""

    def see(self, new_text: str, finished: bool) -> tuple[int, bool]:
        """Takes what is new of the text; returns how many of its first characters may be shown, and whether it is
        blocked from there on."""
        ...


class Guard(Protocol):
    """A check of inputs and outputs; `--guard module:Class` names one."""

    def blocks_input(self, text: str) -> bool:
        """Whether a request with this text is refused."""
        ...

    def watch(self) -> Watch:
        """The check of one new output."""
        ...


class KeywordGuard:
    """Blocks phrases, however they are written: in any case and width, with other white space, with invisible
    characters between the letters.

    Args:
        phrases: as substrings, so `ass` is found in `class`: give ` ass ` for the word.
    """

    def __init__(self, phrases: Iterable[str]) -> None:
        folded = (_Folded(phrase) for phrase in phrases)
        self._phrases = [text for text in dict.fromkeys(each.text for each in folded) if text]

    def blocks_input(self, text: str) -> bool:
        folded = _Folded(text).text
        return any(phrase in folded for phrase in self._phrases)

    def watch(self) -> Watch:
        return _KeywordWatch(self._phrases)


class _Folded:
    """Text in the form in which phrases are compared, with the way back: `starts[i]` is where in the original the
    character that gave `text[i]` begins."""

    def __init__(self, text: str = "") -> None:
        self.text = ""
        self.starts: list[int] = []
        self.length = 0
        self._cluster = ""  # the last character with its marks: more marks may come
        self._cluster_start = 0
        self.add(text)
        if text:
            self.close()

    def add(self, text: str) -> None:
        for char in text:
            if unicodedata.category(char) == "Cf" or (unicodedata.combining(char) and self._cluster):
                self._cluster += char
            else:
                self.close()
                self._cluster, self._cluster_start = char, self.length
            self.length += 1

    def close(self) -> None:
        """Takes the last character as complete."""
        for char in _fold(self._cluster):
            if char == " " and self.text.endswith(" "):
                continue
            self.text += char
            self.starts.append(self._cluster_start)
        self._cluster = ""

    @property
    def complete(self) -> int:
        """Characters of the original that are complete."""
        return self._cluster_start if self._cluster else self.length


def _fold(cluster: str) -> str:
    visible = "".join(char for char in cluster if unicodedata.category(char) != "Cf")
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", visible).casefold())
    return "".join(" " if char.isspace() else char for char in folded)


class _KeywordWatch:
    def __init__(self, phrases: Sequence[str]) -> None:
        self._phrases = phrases
        self._longest = max(map(len, phrases), default=0)
        self._folded = _Folded()
        self._looked = 0

    def see(self, new_text: str, finished: bool) -> tuple[int, bool]:
        folded = self._folded
        folded.add(new_text)
        if finished:
            folded.close()
        begin = max(0, self._looked - self._longest + 1)
        found = [at for at in (folded.text.find(phrase, begin) for phrase in self._phrases) if at >= 0]
        self._looked = len(folded.text)
        if found:
            return folded.starts[min(found)], True
        if finished:
            return folded.length, False
        for size in range(min(self._longest - 1, len(folded.text)), 0, -1):
            ending = folded.text[-size:]
            if any(phrase.startswith(ending) for phrase in self._phrases):
                return folded.starts[-size], False
        return folded.complete, False


class AllOf:
    """Several guards as one: what any of them blocks is blocked."""

    def __init__(self, guards: Sequence[Guard]) -> None:
        self._guards = guards

    def blocks_input(self, text: str) -> bool:
        return any(guard.blocks_input(text) for guard in self._guards)

    def watch(self) -> Watch:
        return _AllWatches([guard.watch() for guard in self._guards])


class _AllWatches:
    def __init__(self, watches: Sequence[Watch]) -> None:
        self._watches = watches
        self._length = 0

    def see(self, new_text: str, finished: bool) -> tuple[int, bool]:
        self._length += len(new_text)
        verdicts = [watch.see(new_text, finished) for watch in self._watches]
        # What one guard holds back another one's hit must wait for, unless it comes first.
        shown = min((count for count, _ in verdicts), default=self._length)
        return shown, any(blocked for _, blocked in verdicts)


def load_guards(classes: Sequence[str], keywords: str | None) -> AllOf | None:
    """The guards that the flags name; None for none. Raises `ConfigError`."""
    guards = [_from_class(name) for name in classes]
    if keywords is not None:
        guards.append(KeywordGuard(_lines(keywords)))
    return AllOf(guards) if guards else None


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--guard-keywords {path}: cannot be read: {reason}") from error
    phrases = [line for line in lines if line.strip()]
    if not phrases:
        raise ConfigError(f"--guard-keywords {path}: it has no phrases; give one a line")
    return phrases


def _from_class(name: str) -> Guard:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ConfigError(f"--guard: {name!r} is not module:Class")
    try:
        made: Any = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise ConfigError(f"--guard {name}: cannot be made: {type(error).__name__}: {error}") from error
    for method in ("blocks_input", "watch"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f"--guard {name}: it has no method {method}()")
    return cast(Guard, made)
