"""Servers to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from tests.serve.scripted import RunningServer


@pytest.fixture(scope="session")
def served() -> Iterator[RunningServer]:
    """One server for all tests that change nothing about it."""
    with RunningServer() as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="session")
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def post(served: RunningServer):
    """Sends a body as it is; returns the response."""

    def send(path: str, body: Any = None, **options: Any) -> httpx2.Response:
        if body is not None:
            options["json"] = body
        return httpx2.post(served.url + path, timeout=60, **options)

    return send
