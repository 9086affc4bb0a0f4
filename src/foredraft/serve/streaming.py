"""Server-sent events, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foredraft.engine.answer_stream import AnswerStream, Piece
from foredraft.serve.errors import ApiError, api_error, encode

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"

LINE_ENDS = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}
"""Line ends to Unicode and to many clients, though not to JSON: escaped, so that an event is one line for everyone."""

log = logging.getLogger(__name__)


def event(content: Any) -> bytes:
    """One event."""
    line = encode(content)
    for character, escape in LINE_ENDS.items():
        line = line.replace(character, escape)
    return b"data: " + line + b"\n\n"


class EventStream(Response):
    """Sends chunks as they come; when the client goes away, `chunks` is closed at once.

    Args:
        chunks: JSON contents; an error that they raise becomes the last event.
        close: called at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[Any], close: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._chunks = chunks
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._events():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        async with aclosing(self._chunks) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    yield event(chunk)
            except Exception as error:  # the status is sent: the error is an event
                if not isinstance(error, ApiError):
                    log.exception("a stream failed")
                yield event(api_error(error).body)
        yield DONE


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Runs `work`, and cancels it when the client goes away; None then."""
    running = asyncio.create_task(work)
    watching = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        return await running if running.done() else None
    finally:
        for task in (running, watching):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answered(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The answer of `work`, unless the client goes away first, when nobody reads one."""
    found = await until_gone(request.receive, work)
    return Response(status_code=499) if found is None else found


async def merged(streams: Sequence[AnswerStream]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several answers as they come, each with the place of its stream."""
    if len(streams) == 1:
        async for piece in streams[0].pieces():
            yield 0, piece
        return
    sources = [stream.pieces() for stream in streams]
    waiting = {asyncio.ensure_future(anext(source)): place for place, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                with suppress(StopAsyncIteration):
                    yield place, task.result()
                    waiting[asyncio.ensure_future(anext(sources[place]))] = place
    finally:
        for task in waiting:
            task.cancel()
