"""Replies to agents' calls, whose clients may leave before the answer.

Invariant: an answer is complete before its first byte is sent. A connection counts as served after the answer's last
byte is sent.
"""

import asyncio
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from rollq.workers.gateway.calls import Answer, Call, CallProtocol, CallRefused, session_over
from rollq.workers.gateway.http_messages import Connection, json_answer

KEEPALIVE_S: Final = 5.0
"""The seconds between comments in a stream whose answer is being generated."""
LOOK_S: Final = 0.25
"""A lost connection is noticed within this many seconds."""
COMMENT: Final = b": keepalive\n\n"


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The reply to a call over its connection: the answer that `asking` will return, in the protocol's format. `body`
    is the JSON object in the request."""

    connection: Connection
    asking: "asyncio.Task[Answer]"
    protocol: CallProtocol
    call: Call
    body: Mapping[str, Any]

    async def send(self) -> web.StreamResponse:
        """Send the answer in the form that the call asks for: complete, or as a stream. Raises `CallRefused` before the
        first byte is sent."""
        try:
            return await (self._stream() if self.call.stream else self._send_whole())
        except ConnectionError:
            if not self.connection.is_lost:
                raise
            return web.Response(status=400)  # the client is gone

    async def _send_whole(self) -> web.StreamResponse:
        await self._until_answered(math.inf)
        response = json_answer(self.protocol.answer(self.call, self.body, self._answer()))
        await response.prepare(self.connection.request)
        await response.write_eof()
        self.connection.is_served = True
        return response

    async def _stream(self) -> web.StreamResponse:
        """Send comments until the answer is ready, then its events."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        if not await self._until_answered(KEEPALIVE_S):
            await response.prepare(self.connection.request)
            while True:
                await response.write(COMMENT)
                if await self._until_answered(KEEPALIVE_S):
                    break
        try:
            answer = self._answer()
        except CallRefused as refused:
            if not response.prepared:
                raise
            await response.write(b"".join(self.protocol.error_events(self.call, refused)))
            await response.write_eof()
            return response
        if not response.prepared:
            await response.prepare(self.connection.request)
        await response.write(b"".join(self.protocol.events(self.call, self.body, answer)))
        self.connection.is_served = True
        with suppress(ConnectionError):  # clients hang up at the last event, before the end of the stream
            await response.write_eof()
        return response

    async def _until_answered(self, limit_s: float) -> bool:
        """Wait for the answer. Returns False after `limit_s`. Raises `ConnectionError` if the client is gone."""
        left_s = limit_s
        while left_s > 0:
            await asyncio.wait([self.asking], timeout=min(LOOK_S, left_s))
            if self.asking.done():
                return True
            if self.connection.is_lost:
                raise ConnectionResetError("the client is gone")
            left_s -= LOOK_S
        return False

    def _answer(self) -> Answer:
        """The answer that has arrived. Raises `CallRefused`."""
        if self.asking.cancelled():
            raise session_over()
        return self.asking.result()
