"""Prompt files: JSON lines with a `prompt` key, or plain text with one prompt a line; and prompts for an engine.

Knows no torch, so that a bad file is refused before a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foredraft.config import require
from foredraft.errors import ConfigError

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM

KEYS = ("prompt", "prediction", "name", "kind")


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of a file.

    Args:
        name, kind: what reports call it and which sort of work it is; a line may leave both out.
        prediction: the text that the answer is expected to resemble, for the method `prediction`.
    """

    prompt: str
    prediction: str | None = None
    name: str | None = None
    kind: str | None = None


def read_prompts(path: Path) -> list[PromptRecord]:
    """The prompts of a `.jsonl` file or of a text file; blank lines are skipped.

    Raises `ConfigError` naming the file and the line at fault.
    """
    text = read_text(path, "prompt file")
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    require(bool(lines), f"prompt file {path}: it has no prompts")
    if path.suffix in (".jsonl", ".json"):
        return _records(lines, str(path))
    return [PromptRecord(line) for _, line in lines]


def read_text(path: Path, what: str) -> str:
    """A UTF-8 file; `ConfigError` says `what` it was for when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{what} {path}: cannot be read: {reason}") from None


def demo_prompts() -> list[PromptRecord]:
    """The prompts that come with the package: repetitive text, code and chat."""
    text = (files("foredraft") / "data" / "demo_prompts.jsonl").read_text(encoding="utf-8")
    return _records(enumerate(text.splitlines(), start=1), "demo_prompts.jsonl")


def has_template(llm: LLM) -> bool:
    """Whether the model brings a chat template."""
    return llm.tokenizer is not None and bool(llm.tokenizer.chat_template)


def encoded(llm: LLM, prompt: str, chat_template: bool | None = None) -> dict[str, Any]:
    """A prompt as the engine takes it, with its token ids.

    Args:
        chat_template: render it as a user's message by the model's template; None: when it has one.
    """
    if has_template(llm) if chat_template is None else chat_template:
        return llm.rendered([{"role": "user", "content": prompt}])
    return {"prompt": prompt, "prompt_token_ids": llm.tokenizer.encode(prompt)}


def _records(lines: Iterable[tuple[int, str]], where: str) -> list[PromptRecord]:
    return [_record(line, f"prompt file {where}, line {number}") for number, line in lines]


def _record(line: str, where: str) -> PromptRecord:
    try:
        found: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    require(isinstance(found, dict), f"{where}: expected an object with the key 'prompt'")
    for key, value in found.items():
        require(key in KEYS, f"{where}: unknown key {key!r}; known keys: {', '.join(KEYS)}")
        require(isinstance(value, str), f"{where}: {key}: {value!r} is not a string")
    require(bool(found.get("prompt")), f"{where}: the key 'prompt' is missing or empty")
    return PromptRecord(**found)
