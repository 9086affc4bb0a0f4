"""Streams: exactly the unstreamed text, whole characters, never the start of a stop string; and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random

import httpx2
import openai
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from tests.serve.scripted import MODEL, RunningServer, script

ALPHABET = [
    *"abc \n.,<>{}\"'\\",
    "é",
    "e\u0301",
    "ß",
    "世",
    "界",
    "あ",
    "👩‍👩‍👧",
    "🏳️‍🌈",
    "👍🏽",
    "def f():\n",
    "done",
    "\u200b",
    "ﷺ",
]


def lines(response: httpx2.Response) -> list[str]:
    return [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]


def random_case(generator: random.Random) -> tuple[str, list[str]]:
    text = "".join(generator.choices(ALPHABET, k=generator.randint(1, 40)))
    stops = []
    for _ in range(generator.randint(0, 3)):
        start = generator.randrange(len(text))
        stops.append(text[start : start + generator.randint(1, 6)])
    return text, stops


def cut(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first."""
    ends = [(text.index(stop) + len(stop), text.index(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("seed", range(12))
def test_pieces_are_the_whole_text(served: RunningServer, seed: int) -> None:
    generator = random.Random(seed)

    async def one(client: openai.AsyncOpenAI, text: str, stops: list[str]) -> None:
        options = {"model": MODEL, "prompt": script(text), "max_tokens": 1000, "temperature": 0, "stop": stops or None}
        whole = (await client.completions.create(**options)).choices[0].text
        pieces = [chunk.choices[0].text async for chunk in await client.completions.create(**options, stream=True)]
        assert "".join(pieces) == whole == cut(text, stops)
        for stop in stops:
            assert stop not in whole
        assert not any("\ufffd" in piece for piece in pieces)
        for count in range(1, len(pieces)):
            assert whole.startswith("".join(pieces[:count]))

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60) as client:
            await asyncio.gather(*(one(client, *random_case(generator)) for _ in range(25)))

    asyncio.run(run())


def test_answers_are_of_openais_types(post, served: RunningServer) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": script("hello")}], "logprobs": True}
    chat |= {"top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}}
    whole = post("/v1/chat/completions", {**chat, "stream_options": None}).json()
    ChatCompletion.model_validate(whole, strict=True)
    completion = {"model": MODEL, "prompt": script("hello"), "logprobs": 2, "best_of": 2}
    Completion.model_validate(post("/v1/completions", completion).json(), strict=True)
    for event in lines(post("/v1/chat/completions", {**chat, "stream": True}))[:-1]:
        ChatCompletionChunk.model_validate(json.loads(event), strict=True)
    streamed = {**completion, "best_of": None, "stream": True, "stream_options": {"include_usage": True}}
    for event in lines(post("/v1/completions", streamed))[:-1]:
        Completion.model_validate({"usage": None, **json.loads(event)} | _with_reason(json.loads(event)), strict=True)
    CreateEmbeddingResponse.model_validate(post("/v1/embeddings", {"model": MODEL, "input": "x"}).json(), strict=True)
    for model in httpx2.get(served.url + "/v1/models").json()["data"]:
        Model.model_validate(model, strict=True)


def _with_reason(event: dict) -> dict:
    """OpenAI's types give streamed completions no type of their own, where a reason may be null."""
    return {"choices": [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in event["choices"]]}


def test_a_stream_ends_with_done(post) -> None:
    response = post("/v1/completions", {"model": MODEL, "prompt": script("ab"), "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines(response)[-1] == "[DONE]"
    assert "content-length" not in response.headers


def test_origins_on_demand(post) -> None:
    body = {"model": MODEL, "prompt": script("la la la la STOP"), "max_tokens": 90, "stream": True, "stop": "STOP"}
    body["temperature"] = 0
    events = [
        json.loads(line) for line in lines(post("/v1/completions", {**body, "speculation": {"origins": True}}))[:-1]
    ]
    spans = [span for event in events for span in event["choices"][0]["spans"]]
    assert "".join(span["text"] for span in spans) == "la la la la "
    assert {span["origin"] for span in spans} <= set("arbt")
    assert any(span["origin"] == "a" for span in spans)
    lengths = [length for event in events for length in event["choices"][0]["draft_lengths"]]
    assert max(lengths) == 4
    chat = {"model": MODEL, "messages": [{"role": "user", "content": body["prompt"]}], "stream": True}
    chat |= {"temperature": 0, "speculation": {"origins": True}}
    told = [json.loads(line)["choices"][0] for line in lines(post("/v1/chat/completions", chat))[:-1]]
    assert "".join(span["text"] for choice in told for span in choice.get("spans", ())) == "la la la la STOP"
    assert "spans" not in post("/v1/completions", body).text


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: RunningServer, stream: bool) -> None:
    served.llm.model.delay = 0.02
    try:
        body = {"model": MODEL, "prompt": "babble", "max_tokens": 2000, "stream": stream, "ignore_eos": True, "n": 2}
        if stream:
            with httpx2.stream("POST", served.url + "/v1/completions", json=body) as response:
                next(response.iter_lines())
                assert served.num_used_blocks > 0
        else:
            with pytest.raises(httpx2.TimeoutException):
                httpx2.post(served.url + "/v1/completions", json=body, timeout=0.5)
        served.wait_until_idle()
        assert served.state.num_admitted == 0
    finally:
        served.llm.model.delay = 0.0


def test_a_reader_of_unicode_lines_reads_every_event_whole(served: RunningServer) -> None:
    """Many clients split lines as `str.splitlines` does, where JSON itself allows U+0085, U+2028 and U+2029 bare."""
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    body = {"model": MODEL, "prompt": script(text), "max_tokens": 100, "temperature": 0, "stream": True}
    answer = httpx2.post(served.url + "/v1/completions", json=body, timeout=60)
    pieces = [json.loads(line)["choices"][0]["text"] for line in lines(answer)[:-1]]
    assert "".join(pieces) == text


def test_a_reader_that_does_not_read_holds_up_nobody(served: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "babble", "max_tokens": 1500, "stream": True, "logprobs": 5, "ignore_eos": True}
    with httpx2.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as slow:
        quick = {"model": MODEL, "prompt": script("quick"), "max_tokens": 20}
        answer = httpx2.post(served.url + "/v1/completions", json=quick, timeout=60)
        assert answer.json()["choices"][0]["text"] == "quick"
        count = sum(
            len(json.loads(line[6:])["choices"][0]["logprobs"]["tokens"]) for line in slow.iter_lines() if "{" in line
        )
    assert count == 1500
