"""A gateway that listens, and requests to it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.offers import Offer
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.gateway.sessions.session import Session
from rollq.workers.settings import GatewaySettings
from support.chat_engine import Model
from support.gateway_calls import make_session, run

RIGHT = {"Authorization": "Bearer the right to set the reward"}
BODY = {"model": "rollq", "messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class Served:
    """A session that is served over HTTP."""

    gateway: Gateway
    session: Session
    token: str
    http: aiohttp.ClientSession

    @property
    def base(self) -> str:
        return self.gateway.base_url(self.token)

    async def post(self, path: str, body: Any = BODY, **headers: str) -> tuple[int, dict[str, Any], Any]:
        """Status, JSON body and headers of the answer."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(self.gateway.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None), answer.headers


@asynccontextmanager
async def listening(settings: GatewaySettings | None = None) -> AsyncIterator[tuple[Gateway, aiohttp.ClientSession]]:
    gateway = Gateway(settings or GatewaySettings())
    server = Server(gateway)
    await server.start()
    async with aiohttp.ClientSession() as http:
        try:
            yield gateway, http
        finally:
            await server.close()


@asynccontextmanager
async def served(session: Session, settings: GatewaySettings | None = None) -> AsyncIterator[Served]:
    async with listening(settings) as (gateway, http):
        with gateway.serving(session, reward_token=RIGHT["Authorization"].removeprefix("Bearer ")) as token:
            yield Served(gateway, session, token, http)


def offer_of(session: Session, token: str, task: str = "math") -> Offer:
    return Offer(task, {"token": token}, lambda: session.calls.is_over, session.close)


def with_served(model: Model, use: Callable[[Served], Awaitable[None]], **settings: Any) -> None:
    async def work() -> None:
        async with served(make_session(model), GatewaySettings(**settings)) as given:
            await use(given)

    run(work)
