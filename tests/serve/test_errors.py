"""Everything a client can do wrong: the right status, OpenAI's error object, the field named, the server unharmed."""

from __future__ import annotations

import json

import pytest
from tests.serve.scripted import CONTEXT, MODEL, RunningServer, script

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def refused(response, status: int, *named: str) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    for name in named:
        assert name in error["message"]
    return error


def chat(**fields) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": script("ok")}], **fields}


def completion(**fields) -> dict:
    return {"model": MODEL, "prompt": script("ok"), **fields}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, None),
        ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"speculation": {"num_speculative_tokens": -1}}, "speculation.num_speculative_tokens"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_wrong_values(post, fields: dict, param: str | None) -> None:
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        error = refused(post(path, body), 400)
        assert error["type"] == "invalid_request_error"
        if param is not None:
            assert error["param"].split(".")[0] == param.split(".")[0]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text only"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            {
                "response_format": {"type": "json_object"},
                "ignore_eos": True,
            },
            "ignore_eos",
        ),
    ],
)
def test_wrong_chat_fields(post, fields: dict, named: str) -> None:
    refused(post(CHAT, chat(**fields)), 400, named)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999]}, "99999"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "\ud800"}, "cannot be encoded"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"logprobs": 100}, "logprobs"),
    ],
)
def test_wrong_completion_fields(post, fields: dict, named: str) -> None:
    body = json.dumps(completion(**fields)).encode()
    refused(post(COMPLETIONS, content=body, headers={"content-type": "application/json"}), 400, named)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt", "list of strings"),
        (COMPLETIONS, {"prompt": ["a"] * 2000}, "prompt", "at most 1024"),
        (COMPLETIONS, {"prompt": "a", "stop": 5}, "stop", "a string or a list of strings"),
        (COMPLETIONS, {"prompt": "a", "stop": list("abcde")}, "stop", "at most 4"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input", "list of strings"),
        ("/v1/embeddings", {"input": []}, "input", "at least one"),
    ],
)
def test_fields_of_several_types_say_what_they_take(post, path: str, fields: dict, param: str, message: str) -> None:
    assert refused(post(path, fields), 400, message)["param"] == param


def test_a_body_of_another_type_is_told_to_be_json(post) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}  # what curl sends by itself
    refused(post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers), 400, "Content-Type: application/json")


def test_large_headers(post) -> None:
    refused(post(CHAT, chat(), headers={"x": "y" * 70_000}), 431, "65536")
    assert post(CHAT, chat(), headers={"x": "y" * 30_000}).status_code == 200


def test_a_limit_that_does_not_fit_names_both_numbers(post) -> None:
    error = refused(post(CHAT, chat(max_tokens=CONTEXT)), 400, str(CONTEXT), "max_tokens")
    assert error["param"] == "max_tokens"
    assert error["code"] == "context_length_exceeded"
    error = refused(post(CHAT, chat(max_completion_tokens=CONTEXT)), 400, str(CONTEXT), "max_completion_tokens")
    assert error["param"] == "max_completion_tokens"
    error = refused(post(COMPLETIONS, completion(prompt="x" * 5000)), 400, "5000", str(CONTEXT))
    assert error["code"] == "context_length_exceeded"


def test_a_model_that_is_not_served(post) -> None:
    for path, body in ((CHAT, chat(model="gpt-9")), (COMPLETIONS, completion(model="../../etc/passwd"))):
        error = refused(post(path, body), 404, MODEL, body["model"])
        assert error["code"] == "model_not_found"
    refused(post("/v1/embeddings", {"model": "no", "input": "x"}), 404, MODEL)
    assert post(CHAT, {key: value for key, value in chat().items() if key != "model"}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"",
        b"[1, 2]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"model": "scripted", "messages": ' + b"[" * 80 + b"]" * 80 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_request(post, content: bytes) -> None:
    fields_of_generation_only = b"temperature" in content or b"max_tokens" in content[:40]
    others = () if fields_of_generation_only else ("/v1/embeddings", "/tokenize", "/detokenize")
    for path in (CHAT, COMPLETIONS, *others):
        refused(post(path, content=content, headers={"content-type": "application/json"}), 400)


def test_null_means_absent(post) -> None:
    fields = (
        "max_tokens",
        "temperature",
        "stop",
        "stream",
        "n",
        "logit_bias",
        "tools",
        "response_format",
        "seed",
        "user",
    )
    assert post(CHAT, chat(**dict.fromkeys(fields))).json()["choices"][0]["message"]["content"] == "ok"


def test_unknown_fields_are_ignored_and_counted(post, served: RunningServer) -> None:
    before = served.state.metrics.unknown_fields._value.get()
    assert post(CHAT, chat(frobnicate=1, reasoning_effort="low")).status_code == 200
    assert post("/tokenize", {"prompt": "x", "frobnicate": 1}).status_code == 200
    assert post("/detokenize", {"tokens": [65], "frobnicate": 1}).status_code == 200
    prediction = {"type": "content", "content": "ok"}  # which this server's drafter does not read
    assert post(CHAT, chat(prediction=prediction)).status_code == 200
    assert served.state.metrics.unknown_fields._value.get() == before + 5


def test_unknown_routes_and_methods(post, served: RunningServer) -> None:
    refused(post("/v1/nothing", {}), 404)
    refused(post("/v1/models", {}), 405)


def test_a_body_above_the_limit() -> None:
    with RunningServer({"max_body_bytes": 5000}) as small:
        import httpx2

        refused(httpx2.post(small.url + CHAT, json=chat(user="x" * 9000)), 413, "5000")

        def pieces():
            for _ in range(20):
                yield b" " * 1000

        headers = {"content-type": "application/json"}
        refused(httpx2.post(small.url + CHAT, content=pieces(), headers=headers), 413, "5000")
        assert httpx2.post(small.url + CHAT, json=chat()).status_code == 200


def test_headers_above_the_limit(served: RunningServer) -> None:
    import asyncio

    import httpx2

    from foredraft.serve.app import create_app

    async def ask(path: str, size: int) -> httpx2.Response:
        # Without a socket between, so that the whole head comes at once, which h11 lets pass.
        transport = httpx2.ASGITransport(create_app(served.state))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as direct:
            return await direct.get(path, headers={"x-long": "x" * size})

    refused(asyncio.run(ask("/version", 70_000)), 431, "65536")
    refused(asyncio.run(ask("/version?q=" + "x" * 60_000, 6_000)), 431, "65536")
    assert asyncio.run(ask("/version", 60_000)).status_code == 200
    for size in (70_000, 200_000, 2_000_000):
        try:
            answer = httpx2.get(served.url + "/version", headers={"x-long": "x" * size})
            assert answer.status_code in (400, 431)
        except (httpx2.WriteError, httpx2.ReadError, httpx2.RemoteProtocolError):
            pass  # closed while the client was still sending
    assert httpx2.get(served.url + "/version").status_code == 200


def test_keys() -> None:
    import httpx2

    with RunningServer({"api_key": ("first", "second")}) as locked:

        def status(key: str | None) -> int:
            headers = {} if key is None else {"Authorization": key}
            return httpx2.post(locked.url + CHAT, json=chat(), headers=headers).status_code

        assert [status(f"Bearer {key}") for key in ("first", "second", "firs", "firstx")] == [200, 200, 401, 401]
        assert status(None) == status("Basic first") == 401
        refused(httpx2.get(locked.url + "/v1/models"), 401, "Bearer")
        for path in ("/health", "/version", "/metrics", "/"):
            assert httpx2.get(locked.url + path).status_code == 200


def test_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from foredraft.serve import access

    compared = []
    real = access.hmac.compare_digest

    def counting(left, right):
        compared.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(access.hmac, "compare_digest", counting)
    check = access.KeyCheck(None, ["aaaa", "bbbb", "cccc"])  # type: ignore[arg-type]
    assert check.is_known("aaaa")
    assert not check.is_known("x" * 500)
    assert compared == [(32, 32)] * 6


def test_too_many_wait() -> None:
    import httpx2

    with RunningServer({"max_waiting": 1}, max_num_seqs=2) as small:
        small.state.num_admitted = 3
        answer = httpx2.post(small.url + CHAT, json=chat())
        error = refused(answer, 429, "at most 3")
        assert error["type"] == "rate_limit_error"
        assert int(answer.headers["retry-after"]) >= 1
        small.state.num_admitted = 0
        refused(httpx2.post(small.url + CHAT, json=chat(n=4)), 400, "at most 3")
        assert httpx2.post(small.url + CHAT, json=chat(n=3)).status_code == 200
        assert small.state.num_admitted == 0


def test_nan_logits_fail_their_request_alone(post, served: RunningServer) -> None:
    served.llm.model.nan_after = ord("%")
    try:
        error = refused(post(CHAT, chat(messages=[{"role": "user", "content": script("50% off")}])), 500, "NaN")
        assert error["type"] == "server_error"
        streamed = post(CHAT, chat(messages=[{"role": "user", "content": script("50% off")}], stream=True))
        events = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert "NaN" in json.loads(events[-2])["error"]["message"]
        assert post(CHAT, chat()).json()["choices"][0]["message"]["content"] == "ok"
    finally:
        served.llm.model.nan_after = None


def test_tokenize_and_detokenize(post) -> None:
    found = post("/tokenize", {"prompt": "né", "return_token_strs": True}).json()
    assert found["tokens"] == list("né".encode())
    assert (found["count"], found["max_model_len"], len(found["token_strs"])) == (3, CONTEXT, 3)
    assert post("/detokenize", {"tokens": found["tokens"]}).json() == {"prompt": "né"}
    rendered = post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert bytes(rendered["tokens"]) == b"<user>hi\n<assistant>"
    refused(post("/tokenize", {}), 400, "prompt")
    refused(post("/detokenize", {"tokens": [-1]}), 400, "tokens")


def test_continuing_the_last_message(post) -> None:
    messages = [{"role": "user", "content": script("abcdef")}, {"role": "assistant", "content": "abc"}]
    body = chat(messages=messages, continue_final_message=True)
    assert post(CHAT, body).json()["choices"][0]["message"]["content"] == "def"
