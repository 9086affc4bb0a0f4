"""Health, draining, the page, predictions: the routes and fields that have no other home."""

from __future__ import annotations

import asyncio
import threading

import httpx2
import openai
import pytest
from tests.serve.scripted import MODEL, RunningServer, script

from foredraft.config import SpeculativeConfig
from foredraft.draft.prediction import PredictionDrafter
from foredraft.serve.app import PAGE
from foredraft.serve.settings import ServerSettings


def test_health_tells_of_a_stuck_engine() -> None:
    with RunningServer() as server:
        assert httpx2.get(server.url + "/health").status_code == 200
        assert httpx2.get(server.url + "/version").json() == {"version": "9.9"}
        forward, server.llm.model.forward = server.llm.model.forward, None
        for _ in range(3):
            answer = httpx2.post(server.url + "/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert answer.status_code == 500
            assert "the engine failed" in answer.json()["error"]["message"]
        assert httpx2.get(server.url + "/health").status_code == 503
        server.llm.model.forward = forward
        body = {"model": MODEL, "prompt": script("again"), "max_tokens": 9}
        answer = httpx2.post(server.url + "/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == "again"
        assert httpx2.get(server.url + "/health").status_code == 200


@pytest.mark.parametrize("timeout", [10.0, 0.2])
def test_a_drain_lets_running_requests_finish_in_time(timeout: float) -> None:
    with RunningServer({"shutdown_timeout": timeout}) as server:
        server.llm.model.delay = 0.02
        found: list[httpx2.Response] = []
        body = {"model": MODEL, "prompt": "babble", "max_tokens": 60, "speculation": {"enabled": False}}

        def ask() -> None:
            found.append(httpx2.post(server.url + "/v1/completions", json=body, timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        while not server.llm.engine.scheduler.running:
            threading.Event().wait(0.01)
        loop = server.server._serving_on
        assert loop is not None
        drained = asyncio.run_coroutine_threadsafe(server.server.drain("test"), loop)
        threading.Event().wait(0.05)
        if timeout > 5:  # else the server may be gone by now
            late = httpx2.post(server.url + "/v1/completions", json=body, timeout=60)
            assert (late.status_code, late.json()["error"]["code"]) == (503, "shutting_down")
        drained.result(30)
        asking.join(30)
        assert found[0].status_code == (200 if timeout > 5 else 503)


def test_the_page_needs_nothing_from_elsewhere(served: RunningServer) -> None:
    page = httpx2.get(served.url + "/")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("style.css", "chat.js"):
        assert f"/page/{name}" in page.text
    for name in (file.name for file in PAGE.glob("*.*")):
        file = httpx2.get(f"{served.url}/page/{name}")
        assert file.status_code == 200
        assert "http://" not in file.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in file.text
    for path in ("/page/../app.py", "/page/..%2fapp.py", "/page/%2e%2e/app.py"):
        assert httpx2.get(served.url + path).status_code == 404


def test_a_prediction_is_drafted_from_and_counted() -> None:
    with RunningServer() as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        server.llm.engine.drafter = PredictionDrafter()
        object.__setattr__(server.llm.config, "speculative", SpeculativeConfig(method="prediction"))
        text = "The quick brown fox jumps over the lazy dog."
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": script(text)}],
            prediction={"type": "content", "content": text.replace("brown", "red")},
            temperature=0,
        )
        assert answer.choices[0].message.content == text
        details = answer.usage.completion_tokens_details
        assert details.accepted_prediction_tokens == answer.usage.speculation["accepted_tokens"] > 10
        assert details.rejected_prediction_tokens > 0


def test_an_open_host_without_a_key_is_open() -> None:
    assert ServerSettings(host="0.0.0.0").is_open
    assert not ServerSettings(host="0.0.0.0", api_key=("k",)).is_open
    assert not ServerSettings().is_open
