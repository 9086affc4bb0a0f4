"""Parts nobody here wrote: LangChain's OpenAI classes, and schemathesis on the server's own OpenAPI document."""

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
