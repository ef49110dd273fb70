"""JSON over HTTP, tried again when that may help. Judges, auxiliary models and the engine behind a server use it."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import aiohttp
import orjson

from rollq.workers.http.retries import RetryPolicy, backoff_s, growing_pause_s, is_transient, parse_retry_after

log = logging.getLogger(__name__)

CONNECT_S = 10.0
KEPT_OPEN_S = 2.0
"""How long an idle connection is used again. vLLM closes its end after 5 s, and a request that meets that is lost."""
LINE_BYTES = 1 << 24
"""Longest line of a streamed answer: the first one of vLLM's repeats the prompt's ids."""
KEPT_BODY_BYTES = 2000
"""How much of a server's refusal is kept in a sample's error."""


class TransientError(Exception):
    """One try failed for a reason that may pass."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def open_session(timeout_s: float, key: str | None) -> aiohttp.ClientSession:
    """A session without a limit of connections, with the server's key if it wants one. Needs a running loop."""
    return aiohttp.ClientSession(
        read_bufsize=LINE_BYTES,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    )


async def exchange(session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
    """Send one request and return its JSON answer.

    Raises `TransientError`, or `ValueError` for a request that the server will always refuse.
    """
    async with _answer(session, method, url, body) as response:
        return _parse(await response.read())


async def stream(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
    """The JSON values of a POST that is answered by server-sent events, until `[DONE]`. Raises as `exchange` does, also
    for an event with an error, and `TransientError` when the events break off."""
    async with _answer(session, "POST", url, body) as response:
        async for line in response.content:
            event = line.strip().removeprefix(b"data:").strip()
            if event == b"[DONE]":
                return
            if not event:
                continue
            value = _parse(event)
            if isinstance(value, dict) and value.get("error"):
                raise _refusal(url, _code(value["error"]), event[:KEPT_BODY_BYTES], None)
            yield value
    raise TransientError("the answer broke off")


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response with status 200."""
    data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"Content-Type": "application/json"}
    try:
        async with session.request(method, url, data=data, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raw = await response.content.read(KEPT_BODY_BYTES)
                retry_after_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
                raise _refusal(url, response.status, raw, retry_after_s)
            yield response
    except TimeoutError as error:
        raise TransientError(f"no answer within {session.timeout.total:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error


def _refusal(url: str, status: int, body: bytes, retry_after_s: float | None) -> TransientError | ValueError:
    """What to raise for an answer that is an error."""
    refusal = f"HTTP {status}: {body.decode(errors='replace')}"
    if is_transient(status):
        return TransientError(refusal, retry_after_s)
    return ValueError(f"{url} refuses the request: {refusal}")


def _code(error: Any) -> int:
    """The status of an error that came in the middle of an answer; without one it is the server's own."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise TransientError(f"an answer that is not JSON: {raw[:80]!r}") from error


@dataclass(slots=True, eq=False)
class _Server:
    """One of several: requests under way, failures in a row, and until when (monotonic) it is left out for them."""

    url: str
    slots: asyncio.Semaphore
    asked: int = 0
    failures: int = 0
    out_until_s: float = 0.0


class JsonCaller:
    """Posts to servers that do the same: at most `concurrent` requests to each at the same time, each request to the
    one with the least to do and tried as often as `policy` says.

    A server that failed is left out for a while, longer each time. Only when all are, a request waits before its next
    try, and then it is made whether they are back or not.
    """

    def __init__(
        self, urls: Sequence[str], policy: RetryPolicy, timeout_s: float, concurrent: int, key: str | None = None
    ) -> None:
        self._servers = [_Server(url.rstrip("/"), asyncio.Semaphore(concurrent)) for url in urls]
        self._policy = policy
        self._timeout_s = timeout_s
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Mapping[str, Any], path: str = "") -> Any:
        """Post `body` and return the answer.

        Raises `ValueError` with the server's words for a refusal, `TransientError` when all tries failed.
        """
        self._session = self._session or open_session(self._timeout_s, self._key)
        failures = 0
        while True:
            server = min(self._servers, key=lambda each: (each.out_until_s > monotonic(), each.asked))
            server.asked += 1
            try:
                async with server.slots:
                    answer = await exchange(self._session, "POST", server.url + path, body)
            except TransientError as error:
                failures += 1
                pause_s = backoff_s(self._policy, failures, error.retry_after_s, random.random())
                self._leave_out(server, error)
                if pause_s is None:
                    raise TransientError(f"{server.url + path} failed {failures} times, last with {error}") from error
                log.debug("try %d failed, at %s: %s", failures, server.url + path, error)
            else:
                server.failures = 0
                return answer
            finally:
                server.asked -= 1
            if all(each.out_until_s > monotonic() for each in self._servers):
                await asyncio.sleep(pause_s)

    def _leave_out(self, server: _Server, error: TransientError) -> None:
        """Requests that fail together count as one failure."""
        if server.out_until_s <= monotonic():
            server.failures += 1
            pause_s = growing_pause_s(self._policy, server.failures, error.retry_after_s, random.random())
            server.out_until_s = monotonic() + pause_s

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None
