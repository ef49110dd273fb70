"""Serves an ASGI app at an address, within connection limits."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.buffer.errors import ConfigError
from rollq.buffer.listening.connections import Connections, State, note
from rollq.buffer.listening.limits import limits_here
from rollq.buffer.listening.listener import Listener, listen
from rollq.monitor.metrics.allowed_hosts import KnownHosts, names_of

log = logging.getLogger(__name__)

STOP_WITHIN_S = 3
"""How long running answers may take after a signal to stop. The wait for an unreachable Redis is 2 s."""


def serve(
    app: ASGIApp, host: str, port: int, allowed_hosts: Iterable[str], *, on_stop: Callable[[], object] = lambda: None
) -> None:
    """Serve `app` until SIGINT or SIGTERM, whose handlers are then restored. Port 0 means a free port.

    The server answers to the names of loopback, `host` and `allowed_hosts`. Either signal calls `on_stop`, which ends
    unlimited answers. Raises `ConfigError` if the address or a name cannot be used.
    """
    app = KnownHosts(app, (*names_of(host), *allowed_hosts))
    try:
        listener = listen(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from error
    config = uvicorn.Config(
        _NotesRequests(app), log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_WITHIN_S
    )
    logging.getLogger("uvicorn.error").addFilter(_WarningsOnceAMinute())
    with listener:
        log.info("serving at http://%s:%d", *listener.getsockname()[:2])
        _Server(config, listener, on_stop).run()


class _NotesRequests:
    """An app that notes the state of connections: answering once a request is complete, and waiting after the
    answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = not has_body(scope)

        async def received() -> Message:
            nonlocal is_complete
            message = await receive()
            if not is_complete and message["type"] == "http.request" and not message.get("more_body", False):
                is_complete = True
                note(State.ANSWERING)
            return message

        if is_complete:
            note(State.ANSWERING)
        try:
            await self._app(scope, received, send)
        finally:
            note(State.WAITING)


def has_body(scope: Scope) -> bool:
    """Whether a request has a body, which may arrive later. Pure."""
    headers = dict(scope.get("headers", ()))
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, listener: socket.socket, on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._listener = Listener(listener, self._make_protocol, Connections(limits_here()))
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets or [])
        self._listener.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._listener.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_stop()
        super().handle_exit(sig, frame)

    def _make_protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        made = make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        return cast(asyncio.Protocol, made)


class _WarningsOnceAMinute(logging.Filter):
    """Passes one warning per minute: uvicorn warns about unreadable requests, which anyone can send."""

    def __init__(self) -> None:
        super().__init__()
        self._warnings = OnceAMinute()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is logged."""
        if record.levelno != logging.WARNING:
            return True
        if count := self._warnings.count():
            record.msg, record.args = "%d requests could not be read: %s", (count, record.getMessage())
        return bool(count)
