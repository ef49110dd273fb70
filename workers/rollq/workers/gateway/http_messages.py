"""Requests and answers on all of the gateway's routes: tokens, JSON, and connections."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

from rollq.buffer.common import exact_json
from rollq.workers.gateway.calls import MOST_MESSAGES, CallRefused, too_many_messages

READ_S: Final = 60.0
"""How many seconds a request may take to arrive."""


class Connection:
    """One request's connection, as a session's `Caller`."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.is_served = False

    @property
    def is_lost(self) -> bool:
        transport = self.request.transport
        return not self.is_served and (transport is None or transport.is_closing())


def bearer_of(request: web.Request) -> str:
    """The bearer token in a request's headers; empty without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def tokens_of(request: web.Request) -> list[str]:
    """The tokens in a request's headers."""
    return [token for token in (bearer_of(request), request.headers.get("x-api-key", "")) if token]


async def body_of(request: web.Request, *, may_be_empty: bool = False) -> Mapping[str, Any]:
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


def json_answer(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer with a JSON body."""
    return web.Response(body=exact_json.dumps(body), status=status, headers=headers, content_type="application/json")
