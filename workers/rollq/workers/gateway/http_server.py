"""The gateway over HTTP: routes, tokens of sessions, and statuses.

Invariant: every route needs the token of a session, except the request for a session, which needs the operator's key.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import web

from rollq.buffer.common import exact_json
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import ConfigError
from rollq.buffer.listening.connections import Connections, State, identify, note
from rollq.buffer.listening.limits import limits_here
from rollq.buffer.listening.listener import Listener, listen
from rollq.workers.gateway.calls import MOST_MESSAGES, Call, CallProtocol, CallRefused, too_many_messages
from rollq.workers.gateway.offers import wanted
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, SESSION_PATH, Gateway
from rollq.workers.gateway.protocols import chat, completions, messages, responses
from rollq.workers.gateway.protocols.models import model, model_list
from rollq.workers.gateway.replies import Connection, reply
from rollq.workers.gateway.request_log import request_log
from rollq.workers.gateway.sessions.outcomes import Outcome, failed_outcome, rewarded
from rollq.workers.gateway.sessions.session import Session

log = logging.getLogger(__name__)

MODEL: Final = "rollq"
"""The name of the model. Requests may use any name."""
PROTOCOLS: Final[Mapping[str, CallProtocol]] = {
    "/chat/completions": chat,
    "/completions": completions,
    "/messages": messages,
    "/responses": responses,
}
OUTCOMES: Final[Mapping[str, Callable[[Mapping[str, Any]], Outcome]]] = {"/reward": rewarded, "/fail": failed_outcome}
COUNT_PATH: Final = "/messages/count_tokens"
SLASHES: Final = re.compile("/{2,}")
READ_S: Final = 60.0
"""How long a request may take to arrive."""


class Server:
    """The HTTP server of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._ignored = LogOnce(log)
        self._started_s = int(time.time())

    async def start(self) -> None:
        """Listen, and give the gateway its URL. Raises `ConfigError` for an address that cannot be used."""
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

    def _models(self, path: str, session: Session) -> web.Response:
        """The list of models, or the model that `path` names."""
        most_tokens = session.tree.most_prompt_tokens
        if path == "/models":
            return _json(model_list(MODEL, self._started_s, most_tokens))
        return _json(model(path.removeprefix("/models/"), self._started_s, most_tokens))

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        token_in_path, path = _split_path(request.path)
        protocol = _protocol_of(path)
        try:
            if request.method == "HEAD" and token_in_path:
                return web.Response()
            if request.method == "POST" and path == "/sessions":
                return await self._offer(request)
            if request.method == "POST" and path in OUTCOMES:
                return await self._close_session(request, token_in_path, OUTCOMES[path])
            session = self._session_of(request, token_in_path)
            if request.method == "GET" and f"{path}/".startswith("/models/"):
                return self._models(path, session)
            return await self._answer(request, session, path, protocol)
        except CallRefused as refused:
            return _refusal(refused, protocol or PROTOCOLS["/chat/completions"])

    async def _answer(
        self, request: web.Request, session: Session, path: str, protocol: CallProtocol | None
    ) -> web.StreamResponse:
        """The answer to a call, or the number of its tokens."""
        if request.method != "POST":
            raise _nothing_here(request, path)
        body = await _body(request)
        if protocol is None:
            raise _nothing_here(request, path)
        call = protocol.parse(body, {name.lower(): value for name, value in request.headers.items()})
        if path == COUNT_PATH:
            return _json(messages.token_count(await session.tree.count_tokens(session.tree.answered.locate(call))))
        self._note_ignored(call)
        return await reply(request, session, protocol, call, body)

    async def _offer(self, request: web.Request) -> web.StreamResponse:
        """Give a session to a program elsewhere. If the client has left, the session is offered again."""
        identify(None)
        taker = self._gateway.taker(_bearer(request))
        identify(KEY_VARIABLE)
        taker.has_asked = True
        connection, offers = Connection(request), taker.offers
        tasks, wait_s = wanted(await _body(request, may_be_empty=True), self._gateway.tasks)
        offer = await offers.take(tasks, wait_s, lambda: connection.is_lost)
        if offer is None:
            raise offers.none_left()
        try:
            response = _json(offer.facts)
            await response.prepare(request)
            await response.write_eof()
            if not connection.is_lost:
                taker.take(offer)
            return response
        except ConnectionError:
            return web.Response(status=400)  # the client is gone
        finally:
            if not offer.taken.is_set():
                offers.put_back(offer)

    async def _close_session(
        self, request: web.Request, token_in_path: str, read: Callable[[Mapping[str, Any]], Outcome]
    ) -> web.Response:
        """End a session with the outcome in a request."""
        identify(None)
        session = self._gateway.session_of_outcome(token_in_path, _tokens(request))
        identify(session)
        outcome = read(await _body(request))
        if not session.close(outcome):
            raise CallRefused("the session has another outcome, or was closed without one", status=409, code="conflict")
        return _json({"reward": outcome.reward})

    def _session_of(self, request: web.Request, token_in_path: str) -> Session:
        """The session of a request. The connection counts as the session's. Raises `CallRefused`."""
        identify(None)
        session = self._gateway.session_of(token_in_path, _tokens(request))
        identify(session)
        return session

    def _note_ignored(self, call: Call) -> None:
        for name in call.ignored:
            self._ignored.warning(name, "requests of agents set %s, which has no effect here", name)


def _url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _nothing_here(request: web.Request, path: str) -> CallRefused:
    return CallRefused(f"{request.method} {path} does not exist here", code="not_found")


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _tokens(request: web.Request) -> list[str]:
    """The tokens in the headers of a request."""
    return [token for token in (_bearer(request), request.headers.get("x-api-key", "")) if token]


def _split_path(path: str) -> tuple[str, str]:
    """The token in a path, and the rest of the path without `/v1`. Clients write `/v1` up to twice, after one or more
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


async def _body(request: web.Request, *, may_be_empty: bool = False) -> Mapping[str, Any]:
    """The JSON object in a request's body; an empty object for a missing body if `may_be_empty`. Raises
    `CallRefused`."""
    try:
        async with asyncio.timeout(READ_S):
            data = await request.read()
        body = exact_json.loads(b"{}" if may_be_empty and not data.strip() else data)
    except TimeoutError as error:
        raise CallRefused(f"the request did not arrive within {READ_S:g} s", code="too_slow") from error
    except ConnectionError as error:
        raise CallRefused("the client left before its request had arrived") from error  # the client is gone
    except web.HTTPRequestEntityTooLarge as error:
        raise CallRefused("the request is larger than max_body_mb of [worker.gateway]", code="too_large") from error
    except ValueError as error:
        raise CallRefused(f"the request is not JSON: {error}") from error
    return _checked(body)


def _checked(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise CallRefused("the request is not a JSON object")
    for name in ("messages", "input"):  # checked here, before a slower protocol reads them
        if isinstance(body.get(name), list) and len(body[name]) > MOST_MESSAGES:
            raise too_many_messages(len(body[name]))
    return body


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(body=exact_json.dumps(body), status=status, headers=headers, content_type="application/json")


def _refusal(refused: CallRefused, protocol: CallProtocol) -> web.Response:
    headers = {"Retry-After": str(refused.retry_after_s)} if refused.retry_after_s else None
    return _json(protocol.error(refused), refused.status, headers)
