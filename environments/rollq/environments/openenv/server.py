"""An OpenEnv server, shared by all episodes of one process: its places, with a queue, and its schemas.

While places are free, episodes open concurrently. Once the server refuses one, episodes queue, and only the first in
the queue retries: when an episode of this process ends, and after growing pauses, since other processes free places
too.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import aiohttp

from rollq.buffer.common.backoff import backoff_s
from rollq.buffer.common.once_a_minute import OnceAMinute
from rollq.environments.openenv.session import CONNECT_S, SessionLost
from rollq.environments.openenv.wire import NO_PLACE, Refused

log = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
REFUSED_WITHIN_S: Final = 0.5
"""A full server refuses at once. After this time, the next episode in the queue may ask."""
REQUEST_S: Final = 60.0


class NoRoute(Exception):
    """The server has no such route, or its environment does not support it."""


class Server:
    """One server, for the episodes of one event loop. `refusal` says why the last episode did not get a place."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.refusal = ""
        self._line = asyncio.Lock()
        self._freed = asyncio.Event()
        self._action: Mapping[str, Any] | None = None
        self._refusals = OnceAMinute()

    async def place(self, connect: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `connect` as soon as the server has a free place. The caller must set a timeout.

        Raises the exceptions of `connect`, but retries after a lost session or a refusal for lack of a place.
        """
        refusals = 0
        standing = self._line.locked()
        if standing:
            await self._line.acquire()
        try:
            while True:
                self._freed.clear()
                async with _ended(asyncio.ensure_future(connect())) as opening:
                    await asyncio.wait([opening], timeout=REFUSED_WITHIN_S if standing else None)
                    if standing and not opening.done():
                        self._line.release()
                        standing = False
                    try:
                        return await opening
                    except (SessionLost, Refused) as error:
                        self._wait_or_raise(error)
                if standing:
                    refusals += 1
                    await self._pause(backoff_s(refusals, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=0.0))
                else:
                    await self._line.acquire()
                    standing = True
        finally:
            if standing:
                self._line.release()

    def free(self) -> None:
        """Note that an episode of this process ended: the first in the queue retries at once."""
        self._freed.set()

    async def action_schema(self) -> Mapping[str, Any]:
        """The JSON schema of the environment's actions. Raises `NoRoute` and `SessionLost`."""
        if self._action is None:
            schemas = await self.get("schema")
            self._action = schemas["action"]
        return self._action

    async def get(self, path: str) -> Any:
        """The JSON at a path. Raises `NoRoute` and `SessionLost`."""
        return await self._request("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """POST a body and return the JSON answer. Raises `NoRoute` and `SessionLost`."""
        return await self._request("POST", path, body)

    async def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        timeout = aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=CONNECT_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as client,
                client.request(method, f"{self.url}/{path}", json=body) as response,
            ):
                if response.status != 200:
                    raise NoRoute(f"{path}: HTTP {response.status}: {(await response.text())[:200]}")
                return await response.json()
        except aiohttp.ClientConnectorError as error:
            raise SessionLost(f"no server answers at {self.url}: start it, or correct env") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise SessionLost(f"{path}: {str(error) or type(error).__name__}") from error

    def _wait_or_raise(self, error: SessionLost | Refused) -> None:
        if isinstance(error, Refused) and error.code != NO_PLACE:
            raise error
        self.refusal = str(error)
        if events := self._refusals.count():
            log.warning("%s: %s (%d times since the last message); the episodes wait", self.url, error, events)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._freed.wait()


@asynccontextmanager
async def _ended(work: "asyncio.Future[T]") -> AsyncIterator["asyncio.Future[T]"]:
    """Cancel the work when this block ends, and wait until the work has closed everything."""
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Server]] = WeakKeyDictionary()


def server_at(url: str) -> Server:
    """The server at a URL, one for all episodes of the running event loop."""
    servers = _servers.setdefault(asyncio.get_running_loop(), {})
    return servers.setdefault(url, Server(url))
