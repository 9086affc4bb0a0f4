"""Parts nobody here wrote: LangChain's OpenAI classes, litellm, and schemathesis on our OpenAPI document."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from tests.serve.scripted import MODEL, RunningServer, script


def test_langchain(served: RunningServer) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    model = ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model=MODEL, temperature=0, max_retries=0)
    assert model.invoke(script("hello")).content == "hello"
    assert "".join(str(chunk.content) for chunk in model.stream(script("hello there"))) == "hello there"

    @tool
    def weather(place: str) -> str:
        """The weather of a place."""
        return place

    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
    (found,) = model.bind_tools([weather]).invoke(script(call)).tool_calls
    assert (found["name"], found["args"]) == ("weather", {"place": "Ulm"})
    embeddings = OpenAIEmbeddings(
        base_url=f"{served.url}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_query("text")) == 8


def test_litellm(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network for prices
    import litellm

    call = '<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    where = {"api_base": f"{served.url}/v1", "api_key": "none", "num_retries": 0}

    def ask(text: str, **options):
        messages = [{"role": "user", "content": text}]
        return litellm.completion(model=f"hosted_vllm/{MODEL}", messages=messages, temperature=0, **where, **options)

    answer = ask(script("hello there"))
    assert answer.choices[0].message.content == "hello there"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("hello there") + 1
    chunks = list(ask(script("hello there"), stream=True, stream_options={"include_usage": True}))
    told = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert told == "hello there"
    (found,) = ask(script(call), tools=[tool]).choices[0].message.tool_calls
    assert (found.function.name, found.function.arguments) == ("weather", '{"place": "Ulm"}')
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=script("hi"), **where)
    assert text.choices[0].text == "hi"
    vectors = litellm.embedding(model=f"openai/{MODEL}", input=["text"], encoding_format="float", **where)
    assert len(vectors.data[0]["embedding"]) == 8
    with pytest.raises(litellm.BadRequestError, match="max_tokens"):
        ask("x", max_tokens=-1)
    with pytest.raises(litellm.NotFoundError, match="no-such"):
        litellm.completion(model="openai/no-such", messages=[{"role": "user", "content": "x"}], **where)


ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)


@pytest.mark.parametrize("path", ROUTES)
def test_schemathesis_finds_no_5xx(served: RunningServer, path: str) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operation = schema[path]["POST"]

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def check(case) -> None:
        if isinstance(case.body, dict):  # else an answer babbles on to the end of the context
            case.body |= {"max_tokens": 4, "max_completion_tokens": 4}
            case.body["n"] = case.body.get("n") if case.body.get("n") in (1, None, "x", 0) else 2
        response = case.call(base_url=served.url, timeout=60)
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    check()
