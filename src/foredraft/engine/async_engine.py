"""`AsyncEngine`: many callers on one event loop, one thread that steps the engine for all of them.

The loop never waits for a step, and a step never waits for a caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeVar

from foredraft.engine.answer_stream import AnswerStream, Piece
from foredraft.engine.llm import LLM
from foredraft.engine.prompts import Prompt
from foredraft.engine.request import Request
from foredraft.errors import EngineStoppedError, RequestError
from foredraft.sampling.params import SamplingParams

Result = TypeVar("Result")
OnStep = Callable[[Sequence[Request]], None]

ASSEMBLY_SECONDS = 10.0
"""Longest time that a prompt's tokens and grammar may take to prepare."""

STUCK_SECONDS = 60.0
"""A step that takes longer counts as stuck."""

FAILURES_IN_A_ROW = 3
"""So many failed steps without one that worked, and the engine counts as broken."""

FAILED_STEP = "the engine failed in this request's step and ended it; others go on: {error}"

log = logging.getLogger(__name__)


class AsyncEngine:
    """A target with an optional drafter, for serving.

    Args:
        llm: the engine to drive; nobody else may step it from now on.
        on_step: told, on the engine's thread, the requests that a step gave tokens to, and those that ended otherwise.

    Call `start` on the event loop before the first request, and `stop` at the end.
    """

    def __init__(self, llm: LLM, on_step: OnStep | None = None) -> None:
        self.llm = llm
        self._engine = llm.engine
        self._on_step = on_step
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._assembly = ThreadPoolExecutor(max_workers=4, thread_name_prefix="assemble")
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._streams: dict[Request, AnswerStream] = {}
        self._stopping = False
        self._draining = False
        self._idle_at = monotonic()
        self._failures_in_a_row = 0
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
    def is_stuck(self) -> bool:
        """Whether the thread hangs in a step, or no step works any more."""
        waits = bool(self._streams or self._inbox) and monotonic() - self._idle_at > STUCK_SECONDS
        return waits or self._failures_in_a_row >= FAILURES_IN_A_ROW

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run; one prompt has `n` of them."""
        return len(self._streams)

    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        num_speculative_tokens: int | None = None,
        priority: int = 0,
    ) -> AnswerStream:
        """Queues one prompt and returns its answers to come. Whoever does not read them to the end must `abort` them.

        Args:
            num_speculative_tokens: γ for this request; 0 for none.
            priority: lower goes first.

        Raises:
            RequestError: the prompt or its parameters cannot be served, or take too long to prepare.
            EngineStoppedError: the engine takes no more requests.
        """
        self._check_running()
        assembled = await self.off_loop(self.llm.assemble, prompt, params, num_speculative_tokens, priority)
        self._check_running()
        stream = AnswerStream(assembled, lambda owner, requests: self._call(lambda: self._abort(owner, requests)))
        self._call(lambda: self._add(stream))
        return stream

    async def generate(self, prompt: Prompt, params: SamplingParams, **options: Any) -> AsyncIterator[Piece]:
        """Answers one prompt, piece by piece, all its choices together; `options` and errors are those of `submit`.

        Leaving the iterator early, or cancelling the task that reads it, takes the request out of the next step.
        """
        stream = await self.submit(prompt, params, **options)
        try:
            async for piece in stream.pieces():
                yield piece
        finally:
            stream.abort()

    async def off_loop(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Runs what prepares a request (tokenizing, templates, grammars) beside the event loop.

        Raises `RequestError` when it takes longer than `ASSEMBLY_SECONDS`.
        """
        future = asyncio.get_running_loop().run_in_executor(self._assembly, work, *arguments)
        try:
            return await asyncio.wait_for(future, ASSEMBLY_SECONDS)
        except TimeoutError:
            raise RequestError(
                f"preparing this request took longer than {ASSEMBLY_SECONDS:.0f} s; shorten its prompt or its grammar"
            ) from None

    async def between_steps(self, work: Callable[[], Result]) -> Result:
        """Runs `work` on the engine's thread, where nothing else uses the model; raises what it raises."""
        self._check_running()
        future: Future[Result] = Future()

        def action() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._call(action)
        return await asyncio.wrap_future(future)

    async def drain(self, timeout: float) -> bool:
        """Takes no new requests and waits for the others; False when some were still running after `timeout` seconds,
        which are then aborted."""
        self._draining = True
        deadline = asyncio.get_running_loop().time() + timeout
        while (self._streams or self._inbox) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        finished = not self._streams and not self._inbox
        for stream in set(self._streams.copy().values()):
            stream.abort()
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

    def _check_running(self) -> None:
        if not self.is_running:
            raise EngineStoppedError("the engine takes no more requests: it is shutting down or was not started")

    def _call(self, action: Callable[[], None]) -> None:
        """Has the engine's thread do something before its next step."""
        with self._wake:
            if not self._inbox and not self._streams:
                self._idle_at = monotonic()
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
                with self._surviving("a request could not be added or ended"):
                    action()
            if self._streams:
                self._step()
            self._idle_at = monotonic()

    @contextlib.contextmanager
    def _surviving(self, what: str) -> Iterator[None]:
        """The thread goes on, whatever happens: without it every caller would wait for ever."""
        try:
            yield
        except Exception:
            log.exception(what)

    def _add(self, stream: AnswerStream) -> None:
        requests = stream.assembled.requests
        try:
            for request in requests:
                self._engine.add(request)
                self._streams[request] = stream
        except Exception as error:  # no room for it, ever: told to its caller alone
            self._fail(stream, str(error))
            return
        if self._stopping:
            self._abort(stream, requests)

    def _abort(self, stream: AnswerStream, requests: list[Request]) -> None:
        running = [request for request in requests if self._streams.pop(request, None) is not None]
        for request in running:
            self._engine.abort(request)
        if running:
            self._told(running)
            self._deliver(stream, running)

    def _fail(self, stream: AnswerStream, reason: str) -> None:
        requests = [request for request in stream.assembled.requests if request.finish_reason in (None, "abort")]
        for request in stream.assembled.requests:
            self._streams.pop(request, None)
            self._engine.abort(request)
        for request in requests:
            request.error = reason
            request.finish("error")
        self._told(requests)
        self._deliver(stream, requests)

    def _step(self) -> None:
        try:
            changed = self._engine.step()
        except Exception as error:
            self._recover(error)
            return
        self.num_steps += 1
        self._failures_in_a_row = 0
        with self._surviving("a step could not be reported"):
            self._told(changed)
        by_stream: dict[AnswerStream, list[Request]] = {}
        for request in changed:
            stream = self._streams.get(request)
            if stream is not None:
                by_stream.setdefault(stream, []).append(request)
                if request.finished:
                    del self._streams[request]
        for stream, requests in by_stream.items():
            try:
                self._deliver(stream, requests)
            except Exception as error:
                log.exception("an answer could not be delivered")
                self._fail(stream, FAILED_STEP.format(error=f"{type(error).__name__}: {error}"))

    def _recover(self, error: Exception) -> None:
        """After a step that failed: nothing is known of what took part in it, so that is ended, and what it may have
        left for others to reuse is forgotten. Requests that wait are untouched."""
        log.exception("a step failed", exc_info=error)
        self.num_failed_steps += 1
        self._failures_in_a_row += 1
        reason = FAILED_STEP.format(error=f"{type(error).__name__}: {error}")
        scheduler = self._engine.scheduler
        waiting = set(scheduler.waiting)
        ended = {self._streams[request] for request in self._streams if request not in waiting}
        for stream in ended or set(self._streams.values()):
            self._fail(stream, reason)
        scheduler.pool.forget()

    def _told(self, changed: Sequence[Request]) -> None:
        if self._on_step is not None:
            self._on_step(changed)

    def _deliver(self, stream: AnswerStream, changed: list[Request]) -> None:
        pieces = stream.new_pieces(changed)
        assert self._loop is not None
        if pieces:
            with contextlib.suppress(RuntimeError):  # the loop is gone, and its readers with it
                self._loop.call_soon_threadsafe(stream.put, pieces)
