"""The requests that wait, in the order in which they are to start.

Lower priorities first, and within a priority first come, first served. So that nobody waits for ever behind a stream of
more urgent ones, the request that came first of all that wait is overdue once `MAX_OVERTAKEN` later ones have started
before it: it is next then, and stays ahead of all that are not overdue until it ends, preempted or not. Only one
becomes overdue at a time, so that a crowd of patient requests cannot push urgent ones aside: one start in
`MAX_OVERTAKEN + 1` is theirs.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from foredraft.engine.request import Request

MAX_OVERTAKEN = 32
"""Later requests that may start before the one that waits for longest."""


def rank(request: Request) -> tuple[int, int, int]:
    """`request.rank`, as a sorting key."""
    return request.rank


class WaitingQueue:
    """Requests that wait, by rank."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._num_added = 0
        self._num_overtaken = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """The requests, the next to start first; of the queue as it was when the iteration began."""
        return iter(list(self._requests))

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    @property
    def first(self) -> Request | None:
        """The next to start."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """Queues a new request."""
        self._num_added += 1
        request.order = self._num_added
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queues a request that had started, at the place that it had."""
        insort(self._requests, request, key=rank)

    def remove(self, request: Request) -> None:
        """Takes a request out that ends without having started."""
        self._requests.remove(request)

    def start(self, request: Request) -> None:
        """Takes a request out because it starts, and counts whom it passes."""
        oldest = min(self._requests, key=lambda each: each.order)
        self._requests.remove(request)
        if request is oldest:
            self._num_overtaken = 0
            return
        self._num_overtaken += 1
        if self._num_overtaken >= MAX_OVERTAKEN and not oldest.overdue:
            oldest.overdue = True
            self._requests.sort(key=rank)
            self._num_overtaken = 0
