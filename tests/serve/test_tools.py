"""Tool calls: read from both formats however the text is split, forced by grammar, in the shapes that clients know."""

from __future__ import annotations

import json
import random

import openai
import pytest
from tests.serve.scripted import MODEL, RunningServer, script

from foredraft.serve.tools import CallArguments, CallStart, Content, ToolReader, format_of_template

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Ulm", "Bonn"]}, "days": {"enum": [1, 2]}},
            "required": ["place", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
ARGUMENTS = '{"place": "Ulm", "text": "a } b \\" {", "list": [1, {"x": null}]}'

CASES = [
    ("hermes", "no call at all", "no call at all", []),
    (
        "hermes",
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "",
        [("weather", ARGUMENTS)],
    ),
    (
        "hermes",
        f'Let me see.\n\n<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>\n'
        '<tool_call>{"name":"clock","arguments":{}}</tool_call>',
        "Let me see.",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "clock"}</tool_call>', "", [("clock", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call> ', None, []),
    ("hermes", "<tool_call>not JSON</tool_call> and on", None, []),
    ("hermes", "1 < 2 and <tool, <tool_cal", None, []),
    ("llama3_json", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [("weather", ARGUMENTS)]),
    (
        "llama3_json",
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "clock", "parameters": {{}}}}',
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    ("llama3_json", '{"type": "function", "name": "clock", "parameters": {}}', "", [("clock", "{}")]),
    ("llama3_json", '{"answer": 42}', None, []),
    ("llama3_json", 'see {"name": "clock", "parameters": {}}', None, []),
    ("llama3_json", '{"name": "nobody", "parameters": {}} so', None, []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000, None])
def test_reading(style: str, text: str, content: str | None, calls: list[tuple[str, str]], size: int | None) -> None:
    reader = ToolReader(style, ["weather", "clock"])
    generator, events, place = random.Random(text), [], 0
    while place < len(text):
        step = generator.randint(1, 9) if size is None else size
        events += reader.feed(text[place : place + step], place + step >= len(text))
        place += step
    said = "".join(event.text for event in events if isinstance(event, Content))
    assert said == (text if content is None else content)
    found = [
        (start.name, "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == start.index))
        for start in events
        if isinstance(start, CallStart)
    ]
    assert found == calls
    for _, arguments in found:
        json.loads(arguments)


def test_one_call_only() -> None:
    reader = ToolReader("hermes", ["clock"], parallel=False)
    call = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    events = reader.feed(call + call, True)
    assert sum(isinstance(event, CallStart) for event in events) == 1


def test_formats_of_templates() -> None:
    assert format_of_template("{% if tools %}<tool_call>") == "hermes"
    assert format_of_template('{% if tools %}{"name": f, "parameters": p}') == "llama3_json"
    assert format_of_template("{{ messages }}") is None


def ask(client: openai.OpenAI, text: str, **options):
    messages = [{"role": "user", "content": script(text)}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **options)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm", "days": 2}}\n</tool_call>'


def test_a_call_is_parsed(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "Well. " + CALL, tools=[WEATHER, CLOCK]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"place": "Ulm", "days": 2}


def test_a_streamed_call_is_the_same(client: openai.OpenAI) -> None:
    whole = ask(client, CALL + "\n" + CALL, tools=[WEATHER]).choices[0].message.tool_calls
    parts: dict[int, list[str]] = {}
    ids, reason = {}, None
    for chunk in ask(client, CALL + "\n" + CALL, tools=[WEATHER], stream=True):
        (choice,) = chunk.choices
        reason = choice.finish_reason or reason
        assert not choice.delta.content
        for part in choice.delta.tool_calls or ():
            ids.setdefault(part.index, part.id)
            parts.setdefault(part.index, []).append(part.function.arguments)
    assert reason == "tool_calls"
    assert len(set(ids.values())) == 2
    assert ["".join(part) for part in parts.values()] == [call.function.arguments for call in whole]


def test_none_leaves_the_text_alone(client: openai.OpenAI) -> None:
    (choice,) = ask(client, CALL, tools=[WEATHER], tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize("wanted", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_made_against_the_models_will(client: openai.OpenAI, wanted) -> None:
    options = {"tools": [WEATHER], "tool_choice": wanted, "max_tokens": 400, "parallel_tool_calls": False}
    options["logit_bias"] = {"32": -100, "10": -100, "9": -100, "13": -100}
    (choice,) = ask(client, "I will not call anything", **options).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"place", "days"}
    assert arguments["place"] in ("Ulm", "Bonn")


def test_a_named_tool_that_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no tool is called"):
        ask(client, "x", tools=[CLOCK], tool_choice={"type": "function", "function": {"name": "weather"}})


def test_a_conversation_with_calls_and_results(client: openai.OpenAI) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
        {"role": "developer", "content": [{"type": "text", "text": script("It is sunny.")}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], temperature=0)
    assert answer.choices[0].message.content == "It is sunny."


def test_a_template_without_tools_refuses_them() -> None:
    with RunningServer() as plain:
        plain.state.tool_style = None
        with openai.OpenAI(base_url=f"{plain.url}/v1", api_key="none") as client:
            with pytest.raises(openai.BadRequestError, match="knows no tools"):
                ask(client, "x", tools=[CLOCK])
            assert ask(client, "fine").choices[0].message.content == "fine"
