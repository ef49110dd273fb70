"""Requests by programs that run agents outside the worker, for sessions and with outcomes.

Invariant: a session is given out once. If the client leaves before it has the session, the session is offered again.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from aiohttp import web

from rollq.buffer.listening.connections import identify
from rollq.workers.gateway.calls import CallRefused
from rollq.workers.gateway.http_messages import Connection, bearer_of, body_of, json_answer, tokens_of
from rollq.workers.gateway.offers import wanted
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway
from rollq.workers.gateway.sessions.outcomes import Outcome, failed_outcome, rewarded

OUTCOMES: Final[Mapping[str, Callable[[Mapping[str, Any]], Outcome]]] = {"/reward": rewarded, "/fail": failed_outcome}
"""Path of a request that ends a session -> function that reads the outcome."""


async def give_session(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """Give a session to a program elsewhere. Raises `CallRefused`."""
    identify(None)
    taker = gateway.taker(bearer_of(request))
    identify(KEY_VARIABLE)
    taker.has_asked = True
    connection, body = Connection(request), await body_of(request, may_be_empty=True)
    offers = taker.offers
    tasks, wait_s = wanted(body, gateway.tasks)
    offer = await offers.take(tasks, wait_s, lambda: connection.is_lost)
    if offer is None:
        raise offers.none_left()
    try:
        response = json_answer(offer.facts)
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


async def close_session(gateway: Gateway, request: web.Request, token_in_path: str, path: str) -> web.Response:
    """End a session with the outcome in a request to a path of `OUTCOMES`. Raises `CallRefused`."""
    identify(None)
    session = gateway.session_of_outcome(token_in_path, tokens_of(request))
    identify(session)
    outcome = OUTCOMES[path](await body_of(request))
    if not session.close(outcome):
        raise CallRefused("the session has another outcome, or was closed without one", status=409, code="conflict")
    return json_answer({"reward": outcome.reward})
