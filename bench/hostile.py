"""Requests that no server should trip over, for `bench.load`: each with the answers that are right."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2

JSON = {"content-type": "application/json"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
REGEXES = ("(a+)+$", "((a{1,999}){1,999}){1,999}", "(a|a)*b", "(?=x)y", "[" * 200, "(.*){50}x" * 20, "a{1000000}")
WRONG: tuple[dict[str, Any], ...] = (
    {"prompt": 5},
    {"prompt": {"a": []}},
    {"prompt": [[1, "x"]]},
    {"prompt": "x", "temperature": "hot"},
    {"prompt": "x", "max_tokens": 1.5},
    {"prompt": "x", "stop": [1]},
    {"prompt": "x", "logit_bias": []},
    {"prompt": [10**12]},
)


def _chat(schema: Any, **more: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "response_format": wanted, **more}


def _schemas(chance: random.Random) -> Any:
    deep: Any = {"type": "string"}
    for _ in range(chance.randrange(5, 40)):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    wide = {"enum": [f"{chance.random()}" for _ in range(3000)]}
    return chance.choice([deep, loop, wide, {"type": "no such type"}, {"allOf": [{"type": "string"}] * 500}])


Post = tuple[str, str, bytes, set[int]]


def _post(name: str, path: str, body: Any, *allowed: int) -> Post:
    return name, path, body if isinstance(body, bytes) else json.dumps(body).encode(), {429, *allowed}


ATTACKS: tuple[Callable[[random.Random], Post], ...] = (
    lambda chance: _post("bad JSON", COMPLETIONS, b'{"prompt": "x", ' + chance.randbytes(20), 400),
    lambda chance: _post("deep JSON", CHAT, b'{"messages": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
    lambda chance: _post("wrong types", COMPLETIONS, chance.choice(WRONG), 400),
    lambda chance: _post("huge n", COMPLETIONS, {"prompt": "x", "n": chance.choice([129, 10**9, -1])}, 400),
    lambda chance: _post("large n", COMPLETIONS, {"prompt": "x", "n": 24, "max_tokens": 2}, 200),
    lambda chance: _post("10 MB prompt", COMPLETIONS, {"prompt": "word " * 2_000_000}, 400),
    lambda chance: _post("schema", CHAT, _chat(_schemas(chance)), 200, 400),
    lambda chance: _post(
        "regex", CHAT, _chat({"type": "string", "pattern": chance.choice(REGEXES)}, temperature=0), 200, 400
    ),
    lambda chance: _post("path in model", COMPLETIONS, {"model": "../../etc/passwd", "prompt": "x"}, 404),
)


async def attack(http: httpx2.AsyncClient, chance: random.Random) -> tuple[str, set[int], int]:
    """Sends one; returns its name, the statuses that are right, and the one that came (0: the connection was cut)."""
    kind = chance.randrange(len(ATTACKS) + 3)
    if kind < len(ATTACKS):
        name, path, content, allowed = ATTACKS[kind](chance)
        return name, allowed, (await http.post(path, content=content, headers=JSON)).status_code
    if kind == len(ATTACKS):
        return "endless body", {0, 413}, await _endless(http)
    if kind == len(ATTACKS) + 1:
        return "huge header", {0, 400, 431}, await _status(http.get("/health", headers={"x-y": "z" * 200_000}))
    return "half a request", {0, 400}, await _half(http)


async def _endless(http: httpx2.AsyncClient) -> int:
    """20 MB in pieces, of no told length."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 100_000

    return await _status(http.post(COMPLETIONS, content=pieces(), headers=JSON))


async def _half(http: httpx2.AsyncClient) -> int:
    """Promises a body, sends a part of it and goes away."""
    url = http.base_url
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{"prompt": ')
    await writer.drain()
    writer.close()
    return 0


async def _status(answer: Any) -> int:
    try:
        return int((await answer).status_code)
    except (httpx2.WriteError, httpx2.ReadError, httpx2.RemoteProtocolError):
        return 0  # refused before all of it was sent, which closes the connection
