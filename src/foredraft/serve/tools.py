"""Tool calls: the formats that models write them in, how they are forced by a grammar, and how they are read.

Two formats: `hermes` (Hermes, Qwen: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`) and `llama3_json` (Llama
3: the bare object, `parameters` for `arguments`, several parted by `;`). Arguments are passed on as the model wrote
them, so that what is streamed and what is not are the same text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import RequestError
from foredraft.sampling.params import StructuredOutputs
from foredraft.serve.protocol import NamedTool, Tool

ARGUMENTS = {"hermes": "arguments", "llama3_json": "parameters"}
OPEN, CLOSE = "<tool_call>", "</tool_call>"

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
_MARKS = re.compile(r'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


Event = Content | CallStart | CallArguments


def format_of_template(template: str) -> str | None:
    """The format that a chat template teaches its model; None where it knows no tools."""
    if "tools" not in template:
        return None
    if OPEN in template:
        return "hermes"
    if '"parameters"' in template or "parameters" in template:
        return "llama3_json"
    return None


def forced_calls(
    tools: Sequence[Tool], choice: str | NamedTool | None, style: str, parallel: bool
) -> StructuredOutputs | None:
    """The grammar that makes a model call a tool, for `required` and named choices; None for the others.

    Raises `RequestError` when the tool named is not among the tools.
    """
    if isinstance(choice, NamedTool):
        chosen = [tool for tool in tools if tool.function.name == choice.function.name]
        if not chosen:
            known = ", ".join(tool.function.name for tool in tools)
            raise RequestError(f"tool_choice: no tool is called {choice.function.name!r}; there are {known}")
    elif choice == "required":
        chosen = list(tools)
    else:
        return None
    schemas = [_call_schema(tool, ARGUMENTS[style]) for tool in chosen]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    call = f"call: %json {json.dumps(schema)}"
    several = parallel and choice == "required"
    if style == "hermes":
        one = f'"{OPEN}\\n" call "\\n{CLOSE}"'
        start = f'start: one ("\\n" one)*\none: {one}' if several else f"start: {one}"
    else:
        start = 'start: call ("; " call)*' if several else "start: call"
    return StructuredOutputs(grammar=f"{start}\n{call}\n")


def _call_schema(tool: Tool, key: str) -> dict[str, Any]:
    function = tool.function
    properties = {"name": {"const": function.name}, key: function.parameters or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}


class ToolReader:
    """Reads an answer as it comes and tells content from calls.

    Args:
        style: `hermes` or `llama3_json`.
        names: of the tools; an object that names another is content.
        parallel: whether more than one call may come; further ones are dropped.
    """

    def __init__(self, style: str, names: Sequence[str], parallel: bool = True) -> None:
        self._style = style
        self._names = set(names)
        self._most = None if parallel else 1
        self._text = ""  # not told yet: content, or a call that is being read
        self._in_call = False
        self._started = False  # the call's name is told
        self._num_told = 0  # characters of the call's arguments
        self._only_content = False
        self.num_calls = 0

    def feed(self, text: str, finished: bool) -> list[Event]:
        """Takes more text; returns what it says, as far as that is certain."""
        self._text += text
        events: list[Event] = []
        while self._read_call(finished, events) if self._in_call else self._read_content(finished, events):
            pass
        return events

    def _read_content(self, finished: bool, events: list[Event]) -> bool:
        """Tells content up to the next call; whether one begins."""
        if self._style == "hermes":
            at = self._text.find(OPEN)
            if at >= 0:
                self._tell(self._text[:at].rstrip(), events)
                self._text, self._in_call = self._text[at + len(OPEN) :], True
                return True
            held = 0 if finished else _overlap(self._text, OPEN)
        else:
            begin = self._text.lstrip("; \n\t" if self.num_calls else None)
            if begin.startswith("{") and not self._only_content:
                self._text, self._in_call = begin, True
                return True
            self._only_content = self._only_content or bool(begin)
            held = 0 if self._only_content else len(self._text)  # white space, or what parts two calls
        content = self._text[: len(self._text) - held]
        # White space may part content from a call, where it belongs to neither.
        told = content if finished else content.rstrip()
        self._tell(told, events)
        self._text = self._text[len(told) :]
        return False

    def _read_call(self, finished: bool, events: list[Event]) -> bool:
        """Tells what is known of a call; whether it is over, with more text behind it."""
        text = self._text
        call = _call_in(text, self._style == "hermes")
        if call.name is not None and call.name not in self._names:
            call = _Call(None, "", call.end)
        if call.name is None:
            if call.end is None and not finished:
                return False
            end = len(text) if call.end is None else call.end
            self._only_content = True
            self._in_call = False
            self._text = text[end:]
            self._tell((OPEN if self._style == "hermes" else "") + text[:end], events)
            return bool(self._text)
        if self._most is None or self.num_calls < self._most or self._started:
            if not self._started:
                self._started = True
                self.num_calls += 1
                events.append(CallStart(self.num_calls - 1, f"chatcmpl-tool-{uuid.uuid4().hex}", call.name))
            if len(call.arguments) > self._num_told:
                events.append(CallArguments(self.num_calls - 1, call.arguments[self._num_told :]))
                self._num_told = len(call.arguments)
        if call.end is None:
            return False
        self._in_call, self._started, self._num_told = False, False, 0
        self._text = text[call.end :]
        return bool(self._text)

    def _tell(self, content: str, events: list[Event]) -> None:
        if content and not (self.num_calls and content.isspace()):
            events.append(Content(content))


@dataclass(frozen=True)
class _Call:
    """What a text says of the call that it begins with.

    `arguments` so far, `end` of the call with its closing tag; both grow with the text and never change.
    """

    name: str | None
    arguments: str
    end: int | None


def _call_in(text: str, tagged: bool) -> _Call:
    head = _HEAD.match(text)
    close = text.find(CLOSE) if tagged else -1
    if head is None:
        return _whole_call(text, tagged, close)
    name = _string(head[1])
    end = _value_end(text, head.end())
    if end is None:  # goes on, or was broken off
        stop = close if close >= 0 else len(text) - (_overlap(text, CLOSE) if tagged else 0)
        return _Call(name, text[head.end() : stop], close + len(CLOSE) if close >= 0 else None)
    if tagged:
        close = text.find(CLOSE, end)
        return _Call(name, text[head.end() : end], close + len(CLOSE) if close >= 0 else None)
    return _Call(name, text[head.end() : end], _value_end(text, text.index("{")))


def _whole_call(text: str, tagged: bool, close: int) -> _Call:
    """A call that is not written in the usual order: read once it is complete."""
    start = len(text) - len(text.lstrip())
    end = _value_end(text, start) if text[start : start + 1] == "{" else None
    after = close + len(CLOSE) if close >= 0 else None
    if end is None or (tagged and after is None):
        return _Call(None, "", after)
    try:
        found = json.loads(text[start:end], strict=False)
    except (ValueError, RecursionError):
        found = {}
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters", {}))
    if not isinstance(name, str):
        return _Call(None, "", after if tagged else end)
    told = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return _Call(name, told, after if tagged else end)


def _value_end(text: str, start: int) -> int | None:
    """Where the JSON object at `start` ends; None when it goes on past the text."""
    depth = 0
    for mark in _MARKS.finditer(text, start):
        if mark[0] in "{[":
            depth += 1
        elif mark[0] in "}]":
            depth -= 1
            if depth <= 0:
                return mark.end()
        elif mark[0] == '"':
            return None  # a string that has not ended
    return None


def _string(quoted: str) -> str:
    try:
        return str(json.loads(quoted, strict=False))
    except ValueError:
        return quoted


def _overlap(text: str, tag: str) -> int:
    """Length of the longest ending of `text` that is a proper beginning of `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-size:])), 0)
