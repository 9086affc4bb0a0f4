"""The official `openai` package against a running server: sync, async, streaming, raw responses, typed parsing."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel
from tests.serve.scripted import MODEL, RunningServer, script

TEXT = "Grüße, 世界! 👩‍👩‍👧 é done. done. done. done."


def chat_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "be brief"}, {"role": "user", "content": script(text)}]


def test_a_chat_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=chat_messages(TEXT))
    (choice,) = answer.choices
    assert choice.message.content == TEXT
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.system_fingerprint == f"{MODEL}-bfloat16-foredraft-9.9"
    assert answer.usage.completion_tokens == len(TEXT.encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert answer.usage.total_time > 0
    speculation = answer.usage.speculation
    assert speculation["draft_tokens"] > 0
    assert 0 < speculation["accepted_tokens"] <= speculation["draft_tokens"]
    assert speculation["acceptance_rate"] == speculation["accepted_tokens"] / speculation["draft_tokens"]
    assert speculation["mean_acceptance_length"] > 1
    assert speculation["steps"] > 0


def test_a_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=chat_messages(TEXT), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    *told, last = chunks
    assert told[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in told[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in told] == [None] * (len(told) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in told)
    assert last.choices == []
    assert last.usage.completion_tokens == len(TEXT.encode()) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert all("\ufffd" not in (chunk.choices[0].delta.content or "") for chunk in told)


def test_without_include_usage_no_chunk_has_any(client: openai.OpenAI) -> None:
    for chunk in client.chat.completions.create(model=MODEL, messages=chat_messages("hello"), stream=True):
        assert chunk.usage is None
        assert chunk.choices


def test_completions_of_every_prompt_form(client: openai.OpenAI) -> None:
    ids = list(script("tokens").encode())
    for prompt, expected in (
        (script("one"), ["one"]),
        ([script("one"), script("two")], ["one", "two"]),
        (ids, ["tokens"]),
        ([ids, list(script("more").encode())], ["tokens", "more"]),
    ):
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40)
        assert [choice.text for choice in answer.choices] == expected
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        texts = [""] * len(expected)
        for chunk in client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == expected


def test_max_tokens_is_a_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=script("abcdefgh"), max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcde", "length")
    assert client.completions.create(model=MODEL, prompt=script("a" * 40)).usage.completion_tokens == 16
    chat = client.chat.completions.create(model=MODEL, messages=chat_messages("abcdef"), max_completion_tokens=3)
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == ("abc", "length")


def test_several_choices(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": [{"role": "user", "content": "babble"}], "n": 3, "max_tokens": 12}
    answer = client.chat.completions.create(**options, seed=5)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    reasons: list[list[str]] = [[], [], []]
    for chunk in client.chat.completions.create(**options, seed=5, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        assert not reasons[choice.index], "nothing follows a choice's last chunk"
        reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert streamed == texts
    assert reasons == [["length"]] * 3


def test_a_seed_repeats_with_and_without_speculation(client: openai.OpenAI) -> None:
    def text(**extra: object) -> str:
        answer = client.completions.create(model=MODEL, prompt="babble", max_tokens=30, seed=11, extra_body=extra)
        return answer.choices[0].text

    assert text() == text() == text(speculation={"enabled": False}) == text(speculation={"num_speculative_tokens": 2})


def test_speculation_can_be_switched_off(client: openai.OpenAI) -> None:
    for off in ({"enabled": False}, {"num_speculative_tokens": 0}):
        answer = client.completions.create(
            model=MODEL, prompt=script("aaaa" * 10), max_tokens=40, extra_body={"speculation": off}
        )
        assert answer.choices[0].text == "aaaa" * 10
        assert answer.usage.speculation["draft_tokens"] == 0
        assert answer.usage.speculation["mean_acceptance_length"] == 1


@pytest.mark.parametrize("stop", ["done", ["zz", "done"], "世", "👩"])
def test_stop_strings(client: openai.OpenAI, stop: str | list[str]) -> None:
    first = stop if isinstance(stop, str) else stop[1]
    expected = TEXT[: TEXT.index(first)]
    answer = client.chat.completions.create(model=MODEL, messages=chat_messages(TEXT), stop=stop)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
    stream = client.chat.completions.create(model=MODEL, messages=chat_messages(TEXT), stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_chat_logprobs(client: openai.OpenAI) -> None:
    def content(**extra: object):
        answer = client.chat.completions.create(
            model=MODEL, messages=chat_messages("né."), logprobs=True, top_logprobs=2, temperature=0, extra_body=extra
        )
        return answer.choices[0].logprobs.content

    entries = content()
    assert [entry.bytes for entry in entries] == [[byte] for byte in "né.".encode()]
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    assert all(entry.logprob <= 0 for entry in entries)
    plain = content(speculation={"enabled": False})
    assert [entry.model_dump() for entry in plain] == [entry.model_dump() for entry in entries]
    stream = client.chat.completions.create(
        model=MODEL, messages=chat_messages("né."), logprobs=True, top_logprobs=2, temperature=0, stream=True
    )
    streamed = [
        entry for chunk in stream if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert [entry.model_dump() for entry in streamed] == [entry.model_dump() for entry in entries]


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    prompt = script("xyz")
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=20, logprobs=1, echo=True)
    (choice,) = answer.choices
    assert choice.text == prompt + "xyz"
    found = choice.logprobs
    assert found.tokens == list(prompt + "xyz")
    assert found.text_offset == list(range(len(prompt) + 3))
    assert found.token_logprobs[0] is None
    assert all(value <= 0 for value in found.token_logprobs[1:])
    assert found.top_logprobs[0] is None
    assert list(found.top_logprobs[-1]) == ["z"]
    scored = client.completions.create(model=MODEL, prompt=prompt, max_tokens=0, logprobs=1, echo=True)
    assert scored.choices[0].text == prompt
    assert scored.choices[0].logprobs.token_logprobs == found.token_logprobs[: len(prompt)]
    assert scored.usage.completion_tokens == 0


def test_logprobs_never_tell_of_text_that_was_cut(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=chat_messages("keep STOP"), stop="STOP", logprobs=True
    )
    told = "".join(entry.token for entry in answer.choices[0].logprobs.content)
    assert told == answer.choices[0].message.content == "keep "


def test_best_of_returns_the_most_probable(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="babble", max_tokens=6, n=2, best_of=5, seed=3, logprobs=0)
    sums = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]
    assert sums == sorted(sums, reverse=True)
    every = client.completions.create(model=MODEL, prompt="babble", max_tokens=6, n=5, seed=3, logprobs=0)
    best = sorted((sum(choice.logprobs.token_logprobs) for choice in every.choices), reverse=True)[:2]
    assert sums == pytest.approx(best)
    assert answer.usage.completion_tokens == every.usage.completion_tokens


def test_the_model_list(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one", "other"])
    assert [len(each.embedding) for each in answer.data] == [8, 8]
    for each in answer.data:
        assert sum(value**2 for value in each.embedding) == pytest.approx(1.0, abs=1e-5)
    ids = list(b"one")
    rows = [[ids_ * power % 17 - 8.0 for power in range(1, 9)] for ids_ in ids]
    mean = [sum(column) / len(column) for column in zip(*rows, strict=True)]
    length = sum(value**2 for value in mean) ** 0.5
    assert answer.data[0].embedding == pytest.approx([value / length for value in mean], abs=1e-5)
    as_floats = client.embeddings.create(model=MODEL, input=ids, encoding_format="float")
    assert as_floats.data[0].embedding == pytest.approx(answer.data[0].embedding, abs=1e-6)
    short = client.embeddings.create(model=MODEL, input="one", dimensions=3)
    assert sum(value**2 for value in short.data[0].embedding) == pytest.approx(1.0, abs=1e-5)
    assert answer.usage.prompt_tokens == 8
    long = client.embeddings.create(model=MODEL, input="ab" * 700)  # in three chunks
    pair = client.embeddings.create(model=MODEL, input="ab")
    assert long.data[0].embedding == pytest.approx(pair.data[0].embedding, abs=1e-5)


def test_raw_responses(client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=chat_messages("hi"))
    assert raw.headers["content-type"] == "application/json"
    assert raw.parse().choices[0].message.content == "hi"


def test_the_async_client(served: RunningServer) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            texts = [f"answer number {index}" for index in range(20)]

            async def ask(text: str) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=chat_messages(text), stream=True, temperature=0
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert await asyncio.gather(*map(ask, texts)) == texts

    asyncio.run(run())


class Place(BaseModel):
    name: str
    people: int


def test_typed_parsing_of_a_response_format(client: openai.OpenAI) -> None:
    text = json.dumps({"name": "Ulm", "people": 128000})
    parsed = client.chat.completions.parse(
        model=MODEL, messages=chat_messages(text), response_format=Place, temperature=0
    )
    assert parsed.choices[0].message.parsed == Place(name="Ulm", people=128000)


def test_a_json_schema_holds_against_the_models_will(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    answer = client.chat.completions.create(
        model=MODEL,
        messages=chat_messages("no JSON at all"),
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=200,
        logit_bias={"32": -100, "10": -100, "9": -100, "13": -100},
    )
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}


def test_retries_after_a_429(served: RunningServer) -> None:
    full = served.state.num_admitted
    served.state.num_admitted = 10**6
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=3)
    try:
        with pytest.raises(openai.RateLimitError, match="try again later"):
            client.with_options(max_retries=0).completions.create(model=MODEL, prompt="x")
        asyncio.run(_free_soon(served, full, client))
    finally:
        served.state.num_admitted = full


async def _free_soon(served: RunningServer, full: int, client: openai.OpenAI) -> None:
    call = asyncio.to_thread(client.completions.create, model=MODEL, prompt=script("ok"), max_tokens=5)
    task = asyncio.create_task(call)
    await asyncio.sleep(0.3)
    served.state.num_admitted = full
    assert (await task).choices[0].text == "ok"
