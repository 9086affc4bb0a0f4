"""`AnswerStream`: the way from the engine's thread to one reader on the event loop.

What a slow reader has not taken is merged into one piece a choice, so that it holds up nobody and takes no more memory
than its own output.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from foredraft.engine.outputs import RequestOutput
from foredraft.engine.request import Request
from foredraft.engine.results import Assembled, best
from foredraft.sampling.logprobs import Logprob


@dataclass
class Piece:
    """What is new of one choice since the last piece: whole characters, and the tokens that were committed.

    Args:
        index: of the choice.
        origins: how each token came about, as in `CompletionOutput`.
        ends: where in the choice's text each token's characters end, were it not cut at a stop string; a token that
            is part of a character ends where the one before it does.
        draft_lengths: draft tokens verified in each step since the last piece.
        finish_reason, stop_reason: of the choice, on its last piece, as in `CompletionOutput`.
        output: the whole answer, on the last piece of the last choice.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: str = ""
    ends: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    draft_lengths: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    output: RequestOutput | None = None

    def merge(self, later: Piece) -> None:
        """Takes in the piece that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.origins += later.origins
        self.ends += later.ends
        self.logprobs += later.logprobs
        self.draft_lengths += later.draft_lengths
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.output = later.output


class AnswerStream:
    """The answers to one prompt, as they come; made by `AsyncEngine.submit`.

    Args:
        assembled: the requests of the prompt.
        abort: ends some of them before their time, from any thread.
    """

    def __init__(self, assembled: Assembled, abort: Callable[[AnswerStream, list[Request]], None]) -> None:
        self.assembled = assembled
        self.over = False
        self._abort = abort
        self._index = {request: index for index, request in enumerate(assembled.requests)}
        self._shown = [0] * len(assembled.requests)
        self._num_steps = [0] * len(assembled.requests)
        self._pending: dict[int, Piece] = {}
        self._arrived = asyncio.Event()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model sees it."""
        first = self.assembled.requests[0]
        return first.token_ids[: first.num_prompt_tokens]

    async def pieces(self) -> AsyncIterator[Piece]:
        """Every piece; the last one carries the whole answer."""
        while not self.over or self._pending:
            for piece in await self._take():
                yield piece

    def abort(self, index: int | None = None) -> None:
        """Takes one choice, or all of them, out of the next step; the last piece still comes."""
        if not self.over:
            requests = self.assembled.requests
            self._abort(self, requests if index is None else [requests[index]])

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

    async def _take(self) -> list[Piece]:
        """The pieces since the last call, one a choice, the one with the whole answer last; waits for the first."""
        await self._arrived.wait()
        self._arrived.clear()
        pieces, self._pending = list(self._pending.values()), {}
        return sorted(pieces, key=lambda piece: (piece.output is not None, piece.index))

    # What follows runs on the engine's thread.

    @property
    def finished(self) -> bool:
        return self.assembled.finished

    def new_pieces(self, changed: list[Request]) -> list[Piece]:
        """What is new of the requests that a step changed, and the whole answer once nothing more can come.

        Completions that are to be ranked come all at the end.
        """
        requests, params = self.assembled.requests, self.assembled.params
        if len(requests) == params.n:
            pieces = [self._piece(self._index[request], request) for request in changed]
        elif self.finished:
            pieces = [self._piece(index, request) for index, request in enumerate(best(requests, params.n))]
        else:
            pieces = []
        if self.finished:
            pieces = pieces or [Piece(0, finish_reason=requests[0].finish_reason)]
            pieces[-1].output = self.assembled.output()
        return pieces

    def _piece(self, index: int, request: Request) -> Piece:
        shown = self._shown[index]
        tokens = request.output_token_ids[shown:]
        self._shown[index] += len(tokens)
        steps, self._num_steps[index] = self._num_steps[index], len(request.draft_lengths)
        detokenizer = request.detokenizer
        return Piece(
            index,
            text=detokenizer.pop_new_text(request.finished) if detokenizer else "",
            token_ids=tokens,
            origins=request.origins[shown:],
            ends=detokenizer.ends[shown:] if detokenizer else [],
            logprobs=request.logprobs[shown:],
            draft_lengths=request.draft_lengths[steps:],
            finish_reason=request.finish_reason if request.finished else None,
            stop_reason=request.stop_reason,
        )
