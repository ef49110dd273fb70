"""Serves an ASGI app at an address."""

import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from rollq.buffer.errors import ConfigError

log = logging.getLogger(__name__)

STOP_WITHIN_S = 1
"""How long answers that are under way may take after a signal to stop."""


def serve(app: ASGIApp, host: str, port: int, *, on_stop: Callable[[], object] = lambda: None) -> None:
    """Serve `app` until SIGINT or SIGTERM, which then have the effect that they had before. Port 0: a free one.

    `on_stop` is called at such a signal, so that answers without an end can end. Raises `ConfigError` if the address
    cannot be used.
    """
    try:
        listener = _listen(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from error
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_WITHIN_S
    )
    with listener:
        log.info("serving at http://%s:%d", *listener.getsockname()[:2])
        _Server(config, on_stop).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_stop()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener
