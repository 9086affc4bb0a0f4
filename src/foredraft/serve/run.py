"""Runs the application: a socket taken before the model loads, signals that drain, exit 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from foredraft.errors import ConfigError
from foredraft.serve.app import create_app
from foredraft.serve.settings import MAX_HEADER_BYTES, ServerSettings
from foredraft.serve.state import ServerState

BACKLOG = 2048

log = logging.getLogger(__name__)


def bind(settings: ServerSettings) -> socket.socket:
    """The socket to listen on; raises `ConfigError` when it cannot be had."""
    where = f"--host {settings.host} --port {settings.port}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"{where}: there is no such address: {error}") from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(BACKLOG)  # at once: two servers may bind one port, but only one may listen
    except OSError as error:
        made.close()
        raise ConfigError(f"{where}: cannot listen there: {error.strerror}; choose another --port") from error
    return made


class Server(uvicorn.Server):
    """uvicorn, with a drain before its own shutdown.

    The first SIGTERM or SIGINT stops new requests (503) and waits for the running ones; a second one does not wait.
    """

    def __init__(self, state: ServerState, log_level: str = "warning") -> None:
        config = uvicorn.Config(
            create_app(state),
            log_config=None,
            log_level=log_level,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            http="h11",
        )
        super().__init__(config)
        self._state = state
        self._draining = False
        self._serving_on: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving_on = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining or self._serving_on is None:
            self.should_exit = self.force_exit = True
            return
        self._draining = True
        name = signal.Signals(sig).name
        self._serving_on.call_soon_threadsafe(lambda: asyncio.ensure_future(self.drain(name)))

    async def drain(self, why: str) -> None:
        """Lets running requests finish, then ends the server."""
        timeout = self._state.settings.shutdown_timeout
        log.info(f"{why}: taking no more requests; the running ones have {timeout:g} s to finish")
        finished = await self._state.engine.drain(timeout)
        log.info("all requests finished" if finished else "some requests were cut off")
        self.should_exit = True


def run_server(state: ServerState, listening: socket.socket) -> None:
    """Serves until a signal ends it."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    log.info(f"serving {', '.join(state.names)} on http://{shown}:{port}")
    asyncio.run(Server(state).serve(sockets=[listening]))
