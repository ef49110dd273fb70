"""Sends the answer of a call to the client, which may leave before the answer is ready.

Invariant: an answer is complete before its first byte is sent. A connection counts as served after its last byte is
sent.
"""

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

from aiohttp import web

from rollq.buffer.common import exact_json
from rollq.workers.gateway.calls import Answer, Call, CallProtocol, CallRefused, session_over
from rollq.workers.gateway.sessions.session import Session

KEEPALIVE_S: Final = 5.0
"""Pause between comments in a stream whose answer is being made."""
LOOK_S: Final = 0.25
"""How soon a lost connection is noticed."""
COMMENT: Final = b": keepalive\n\n"


class Connection:
    """The connection of one request, as a session's `Caller`."""

    def __init__(self, request: web.Request) -> None:
        self.is_served = False
        self._request = request

    @property
    def is_lost(self) -> bool:
        transport = self._request.transport
        return not self.is_served and (transport is None or transport.is_closing())


async def reply(
    request: web.Request, session: Session, protocol: CallProtocol, call: Call, body: Mapping[str, Any]
) -> web.StreamResponse:
    """Ask the session for the answer to a call, and send it. Raises `CallRefused` before the first byte is sent."""
    connection = Connection(request)
    asking = session.calls.ask(session.tree.answered.locate(call), connection)
    try:
        if call.stream:
            return await _stream(request, asking, connection, protocol, call, body)
        await _until_answered(asking, connection, None)
        payload = exact_json.dumps(protocol.answer(call, body, _result(asking)))
        response = web.Response(body=payload, content_type="application/json")
        await response.prepare(request)
        await response.write_eof()
        connection.is_served = True
        return response
    except ConnectionError:
        if not connection.is_lost:
            raise
        return web.Response(status=400)  # the client is gone
    finally:
        if not connection.is_served:
            session.calls.note_lost()


async def _stream(
    request: web.Request,
    asking: "asyncio.Task[Answer]",
    connection: Connection,
    protocol: CallProtocol,
    call: Call,
    body: Mapping[str, Any],
) -> web.StreamResponse:
    """Send the events of an answer, and comments until it is ready."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    if not await _until_answered(asking, connection, KEEPALIVE_S):
        await response.prepare(request)
        while True:
            await response.write(COMMENT)
            if await _until_answered(asking, connection, KEEPALIVE_S):
                break
    try:
        answer = _result(asking)
    except CallRefused as refused:
        if not response.prepared:
            raise
        await response.write(b"".join(protocol.error_events(call, refused)))
        await response.write_eof()
        return response
    if not response.prepared:
        await response.prepare(request)
    await response.write(b"".join(protocol.events(call, body, answer)))
    connection.is_served = True
    with suppress(ConnectionError):  # clients hang up at the last event, before the end of the stream
        await response.write_eof()
    return response


async def _until_answered(asking: "asyncio.Task[Answer]", connection: Connection, limit_s: float | None) -> bool:
    """Wait for an answer; False after `limit_s`. Raises `ConnectionError` if the client is gone."""
    left_s = math.inf if limit_s is None else limit_s
    while left_s > 0:
        await asyncio.wait([asking], timeout=min(LOOK_S, left_s))
        if asking.done():
            return True
        if connection.is_lost:
            raise ConnectionResetError("the client is gone")
        left_s -= LOOK_S
    return False


def _result(asking: "asyncio.Task[Answer]") -> Answer:
    """The answer that has come. Raises `CallRefused`."""
    if asking.cancelled():
        raise session_over()
    return asking.result()
