"""`AsyncEngine`: many callers on one event loop, one thread that steps the engine for all of them.

The loop never waits for a step, and a step never waits for a caller: what a slow reader has not taken is merged into
one piece, so it holds up nobody and takes no more memory than its own output.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from foredraft.engine.llm import LLM
from foredraft.engine.outputs import RequestOutput
from foredraft.engine.prompts import Prompt
from foredraft.engine.request import Request
from foredraft.engine.results import Assembled
from foredraft.errors import EngineStoppedError, RequestError
from foredraft.sampling.logprobs import Logprob
from foredraft.sampling.params import SamplingParams

ASSEMBLY_SECONDS = 10.0
"""Longest time that a prompt's tokens and grammar may take to prepare."""

FAILED_STEP = "the engine failed in this request's step and ended it; others go on: {error}"


@dataclass
class Piece:
    """What is new of one choice since the last piece: whole characters, and the tokens that were committed.

    Args:
        index: of the choice.
        origins: how each token came about, as in `CompletionOutput`.
        finish_reason: of the choice, on its last piece.
        output: the whole answer, on the last piece of the last choice.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: str = ""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    output: RequestOutput | None = None

    def merge(self, later: Piece) -> None:
        """Takes in the piece that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.origins += later.origins
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.output = later.output


class AsyncEngine:
    """A target with an optional drafter, for serving.

    Args:
        llm: the engine to drive; nobody else may step it from now on.

    Call `start` on the event loop before the first request, and `stop` at the end.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._engine = llm.engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._assembly = ThreadPoolExecutor(max_workers=2, thread_name_prefix="assemble")
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._streams: dict[Request, _Stream] = {}
        self._stopping = False
        self._draining = False
        self.num_steps = 0
        """Steps made since the start; it grows while there is work, unless the engine is stuck."""
        self.num_failed_steps = 0

    async def start(self) -> None:
        """Begins to step."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether requests are taken and stepped."""
        return self._thread is not None and self._thread.is_alive() and not self._draining

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run; one prompt has `n` of them."""
        return len(self._streams)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_speculative_tokens: int | None = None,
        priority: int = 0,
    ) -> AsyncIterator[Piece]:
        """Answers one prompt, piece by piece, all its choices together.

        Leaving the iterator early, or cancelling the task that reads it, takes the request out of the next step.

        Args:
            num_speculative_tokens: γ for this request; 0 for none.
            priority: lower goes first.

        Raises:
            RequestError: the prompt or its parameters cannot be served, or take too long to prepare.
            EngineStoppedError: the engine takes no more requests.
        """
        if not self.is_running:
            raise EngineStoppedError("the engine takes no more requests: it is shutting down or was not started")
        assembled = await self._assembled(prompt, params, num_speculative_tokens, priority)
        stream = _Stream(assembled)
        self._call(lambda: self._add(stream))
        try:
            while True:
                for piece in await stream.take():
                    yield piece
                    if piece.output is not None:
                        return
        finally:
            if not stream.over:
                self._call(lambda: self._abort(stream))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams, **options: Any
    ) -> AsyncIterator[Piece]:
        """Answers a conversation, rendered by the model's chat template; `options` are those of `generate`."""
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._assembly, self.llm.rendered, messages)
        async for piece in self.generate(prompt, params, **options):
            yield piece

    async def drain(self, timeout: float) -> bool:
        """Takes no new requests and waits for the others; False when some were still running after `timeout` seconds,
        which are then aborted."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout
        while self._streams and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        finished = not self._streams
        for stream in set(self._streams.values()):
            self._call(lambda stream=stream: self._abort(stream))  # type: ignore[misc]
        return finished

    async def stop(self) -> None:
        """Aborts what runs and ends the thread."""
        await self.drain(0.0)
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        self._assembly.shutdown(wait=False, cancel_futures=True)

    async def _assembled(self, prompt: Prompt, params: SamplingParams, gamma: int | None, priority: int) -> Assembled:
        work = asyncio.get_running_loop().run_in_executor(
            self._assembly, self.llm.assemble, prompt, params, gamma, priority
        )
        try:
            return await asyncio.wait_for(work, ASSEMBLY_SECONDS)
        except TimeoutError:
            raise RequestError(
                f"preparing this request took longer than {ASSEMBLY_SECONDS:.0f} s; shorten its prompt or its grammar"
            ) from None

    def _call(self, action: Callable[[], None]) -> None:
        """Has the engine's thread do something before its next step."""
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # Everything below runs on the engine's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._inbox and not self._streams and not self._stopping:
                    self._wake.wait()
                actions = list(self._inbox)
                self._inbox.clear()
                if self._stopping and not self._streams and not actions:
                    return
            for action in actions:
                action()
            if self._streams:
                self._step()

    def _add(self, stream: _Stream) -> None:
        try:
            for request in stream.assembled.requests:
                self._engine.add(request)
                self._streams[request] = stream
        except Exception as error:  # no room for it, ever: told to its caller alone
            self._fail(stream, str(error))
            return
        if self._stopping:
            self._abort(stream)

    def _abort(self, stream: _Stream) -> None:
        for request in stream.assembled.requests:
            if self._streams.pop(request, None) is not None:
                self._engine.abort(request)
        self._deliver(stream, [])

    def _fail(self, stream: _Stream, reason: str) -> None:
        for request in stream.assembled.requests:
            if self._streams.pop(request, None) is not None:
                self._engine.abort(request)
            request.error = reason
            request.finish("error")
        self._deliver(stream, [])

    def _step(self) -> None:
        try:
            changed = self._engine.step()
        except Exception as error:
            # Nothing is known of the state of those that took part; those that wait are untouched.
            self.num_failed_steps += 1
            reason = FAILED_STEP.format(error=f"{type(error).__name__}: {error}")
            running = [request for request in self._streams if request in self._engine.scheduler.running]
            for stream in {self._streams[request] for request in running or self._streams}:
                self._fail(stream, reason)
            return
        self.num_steps += 1
        pieces: dict[_Stream, list[Piece]] = {}
        for request in changed:
            owner = self._streams.get(request)
            if owner is not None:
                pieces.setdefault(owner, []).append(owner.piece(request))
                if request.finished:
                    del self._streams[request]
        for stream, new in pieces.items():
            self._deliver(stream, new)

    def _deliver(self, stream: _Stream, pieces: list[Piece]) -> None:
        if stream.finished and (not pieces or pieces[-1].output is None):
            output = stream.assembled.output()
            if pieces:
                pieces[-1].output = output
            else:
                pieces = [Piece(0, finish_reason=output.outputs[0].finish_reason, output=output)]
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is gone, and its readers with it
            self._loop.call_soon_threadsafe(stream.put, pieces)


class _Stream:
    """The way from the engine's thread to one reader."""

    def __init__(self, assembled: Assembled) -> None:
        self.assembled = assembled
        self.over = False
        self._index = {request: index for index, request in enumerate(assembled.requests)}
        self._shown = [0] * len(assembled.requests)
        self._pending: dict[int, Piece] = {}
        self._arrived = asyncio.Event()

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.assembled.requests)

    def piece(self, request: Request) -> Piece:
        """What is new of a request; on the engine's thread. Nothing of completions that are still to be ranked."""
        index = self._index[request]
        if len(self._shown) > self.assembled.params.n:
            return Piece(0)
        shown = self._shown[index]
        tokens = request.output_token_ids[shown:]
        self._shown[index] += len(tokens)
        text = request.detokenizer.pop_new_text(request.finished) if request.detokenizer else ""
        reason = request.finish_reason if request.finished else None
        return Piece(index, text, tokens, request.origins[shown:], request.logprobs[shown:], reason)

    def put(self, pieces: list[Piece]) -> None:
        """Adds pieces; on the event loop."""
        for piece in pieces:
            known = self._pending.get(piece.index)
            if known is None:
                self._pending[piece.index] = piece
            else:
                known.merge(piece)
            self.over = self.over or piece.output is not None
        self._arrived.set()

    async def take(self) -> list[Piece]:
        """The pieces since the last call, one a choice, the one with the whole answer last; waits for the first."""
        await self._arrived.wait()
        self._arrived.clear()
        pieces, self._pending = list(self._pending.values()), {}
        return sorted(pieces, key=lambda piece: (piece.output is not None, piece.index))
