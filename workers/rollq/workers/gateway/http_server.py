"""The gateway over HTTP: it routes requests.

Invariant: every route needs a session's token, except the request for a session, which needs the operator's or a
program's key, and HEAD, whose answer is empty.
"""

import logging
import re
import socket
import time
from collections.abc import Mapping
from typing import Final

from aiohttp import web

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import ConfigError
from rollq.buffer.listening.connections import Connections, State, identify, note
from rollq.buffer.listening.limits import limits_here
from rollq.buffer.listening.listener import Listener, listen
from rollq.workers.gateway.calls import CallProtocol, CallRefused
from rollq.workers.gateway.http_messages import Connection, body_of, json_answer, tokens_of
from rollq.workers.gateway.open_sessions import SESSION_PATH, Gateway
from rollq.workers.gateway.program_requests import OUTCOMES, close_session, give_session
from rollq.workers.gateway.protocols import chat, completions, messages, responses
from rollq.workers.gateway.protocols.models import models_at
from rollq.workers.gateway.replies import Reply
from rollq.workers.gateway.request_log import request_log
from rollq.workers.gateway.sessions.session import Session

log = logging.getLogger(__name__)

MODEL: Final = "rollq"
"""The model's name. Requests may use any name."""
PROTOCOLS: Final[Mapping[str, CallProtocol]] = {
    "/chat/completions": chat,
    "/completions": completions,
    "/messages": messages,
    "/responses": responses,
}
COUNT_PATH: Final = "/messages/count_tokens"
SLASHES: Final = re.compile("/{2,}")


class Server:
    """The HTTP server of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._ignored = LogOnce(log)
        self._started_s = int(time.time())

    async def start(self) -> None:
        """Listen, and set the gateway's URL. Raises `ConfigError` for an address that cannot be used."""
        settings = self._gateway.settings
        app = web.Application(client_max_size=int(settings.max_body_mb * 1e6))
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(
            app, access_log=None, logger=request_log, keepalive_timeout=75, shutdown_timeout=1.0
        )
        await self._runner.setup()
        assert self._runner.server is not None
        host, _, port = settings.bind.rpartition(":")
        try:
            bound = listen(host.strip("[]"), int(port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"[worker.gateway] bind = {settings.bind!r}: {error}") from error
        self._gateway.url = settings.url.rstrip("/") or _url_of(bound)
        self._listener = Listener(bound, self._runner.server, Connections(limits_here()))
        self._listener.start()

    async def close(self) -> None:
        """Stop listening."""
        self._gateway.offers.end_waits()
        if self._listener is not None:
            await self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # requests

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        note(State.ANSWERING)
        try:
            return await self._respond(request)
        finally:
            note(State.WAITING)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        token_in_path, path = _split_path(request.path)
        protocol = _protocol_of(path)
        try:
            if request.method == "HEAD" and token_in_path:
                return web.Response()
            if request.method == "POST" and path == "/sessions":
                return await give_session(self._gateway, request)
            if request.method == "POST" and path in OUTCOMES:
                return await close_session(self._gateway, request, token_in_path, path)
            identify(None)
            session = self._gateway.session_of(token_in_path, tokens_of(request))
            identify(session)  # the connection counts as the session's
            if request.method == "GET" and f"{path}/".startswith("/models/"):
                return json_answer(models_at(path, MODEL, self._started_s, session.tree.most_prompt_tokens))
            return await self._answer(request, session, path, protocol)
        except CallRefused as refused:
            return _refusal(refused, protocol or PROTOCOLS["/chat/completions"])

    async def _answer(
        self, request: web.Request, session: Session, path: str, protocol: CallProtocol | None
    ) -> web.StreamResponse:
        """The answer to a call, or the number of its tokens. Raises `CallRefused` before the first byte is sent."""
        if request.method != "POST":
            raise _nothing_here(request, path)
        body = await body_of(request)
        if protocol is None:
            raise _nothing_here(request, path)
        call = protocol.parse(body, {name.lower(): value for name, value in request.headers.items()})
        if path == COUNT_PATH:
            return json_answer(messages.token_count(await session.tree.count_tokens(call)))
        for name in call.ignored:
            self._ignored.warning(name, "requests of agents set %s, which has no effect here", name)
        connection = Connection(request)
        asking = session.calls.ask(call, connection)
        try:
            return await Reply(connection, asking, protocol, call, body).send()
        finally:
            if not connection.is_served:
                session.calls.note_lost()


def _url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _nothing_here(request: web.Request, path: str) -> CallRefused:
    return CallRefused(f"{request.method} {path} does not exist here", code="not_found")


def _split_path(path: str) -> tuple[str, str]:
    """Return a path's token and the rest of the path without `/v1`. Clients write `/v1` up to twice, after one or more
    slashes."""
    token, path = "", SLASHES.sub("/", path)
    if path.startswith(SESSION_PATH):
        token, _, rest = path.removeprefix(SESSION_PATH).partition("/")
        path = "/" + rest
    while path.startswith("/v1/"):
        path = path.removeprefix("/v1")
    return token, path.rstrip("/") or "/"


def _protocol_of(path: str) -> CallProtocol | None:
    return messages if path == COUNT_PATH else PROTOCOLS.get(path)


def _refusal(refused: CallRefused, protocol: CallProtocol) -> web.Response:
    headers = {"Retry-After": str(refused.retry_after_s)} if refused.retry_after_s else None
    return json_answer(protocol.error(refused), refused.status, headers)
