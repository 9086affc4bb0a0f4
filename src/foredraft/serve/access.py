"""What every request passes first: the size of its head and body, and its key. Plain ASGI, before a body is read."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.serve.errors import ApiError

OPEN_PATHS = ("/", "/health", "/version", "/metrics")
"""Paths that need no key, like vLLM's; what is below `/page/` is the page's own scripts."""


class HeadLimit:
    """Refuses requests whose line and headers are above `max_bytes` with 431.

    The parser's own limit is on what it waits for: a long head that comes at once passes it.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            size += sum(len(name) + len(value) for name, value in scope["headers"])
            if size > self._max_bytes:
                message = f"the headers are above this server's limit of {self._max_bytes} bytes"
                await ApiError(431, message, code="headers_too_large").response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuses bodies above `max_bytes` with 413, whether or not they tell their length."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = ApiError(
            413, f"the body is above this server's limit of {self._max_bytes} bytes", code="body_too_large"
        )
        told = Headers(scope=scope).get("content-length", "0")
        if not (told.isascii() and told.isdecimal()) or len(told) > 15 or int(told) > self._max_bytes:
            await refusal.response()(scope, receive, send)
            return
        size = 0

        async def counted() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_bytes:
                raise HTTPException(413, refusal.message)  # which FastAPI passes on while it reads a body
            return message

        await self._app(scope, counted, send)


class KeyCheck:
    """Refuses requests without one of the keys with 401.

    Keys are compared by digest, every one of them, so that the time tells nothing of how much of a key was right.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_open(scope):
            sent = Headers(scope=scope).get("authorization", "")
            kind, _, key = sent.partition(" ")
            if kind.lower() != "bearer" or not self.is_known(key.strip()):
                message = "a key is needed: send it as `Authorization: Bearer KEY`"
                if sent:
                    message = "the key is wrong"
                refusal = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await refusal.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def is_known(self, key: str) -> bool:
        """Whether `key` is one of the keys."""
        digest = sha256(key.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, own) for own in self._digests]
        return any(matches)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        path = scope["path"]
        return scope["method"] == "OPTIONS" or path in OPEN_PATHS or path.startswith("/page/")
