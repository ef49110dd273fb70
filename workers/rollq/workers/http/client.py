"""Exchanges JSON over HTTP. The exceptions distinguish errors that a retry may fix."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
import orjson

from rollq.buffer.common import exact_json
from rollq.buffer.errors import RollqError
from rollq.workers.http.retries import is_transient, parse_retry_after

CONNECT_S = 10.0
KEPT_OPEN_S = 2.0
"""How many seconds an idle connection stays open. vLLM closes its end after 5 s, and a request sent at that moment is
lost."""
LINE_BYTES = 1 << 24
"""The longest line of a streamed answer, in bytes: vLLM's first line repeats the prompt's ids."""
KEPT_BODY_BYTES = 2000
"""How many bytes of a server's refusal are kept in a sample's error."""


class TransientError(RollqError):
    """A server failed for a temporary reason: overload, a lost connection, a timeout."""

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unanswered(TransientError):
    """A server did not answer in time."""


def open_session(timeout_s: float, key: str | None) -> aiohttp.ClientSession:
    """A session without a connection limit, with the server's key if it needs one. Needs a running event loop."""
    return aiohttp.ClientSession(
        read_bufsize=LINE_BYTES,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S),
        timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S),
        headers={"Authorization": f"Bearer {key}"} if key else None,
    )


async def exchange(session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None) -> Any:
    """Send one request and return its JSON answer.

    Raises `TransientError` (`Unanswered` after the session's timeout), or `ValueError` for a request that the server
    will always refuse.
    """
    async with _answer(session, method, url, body) as response:
        return _parse(await response.read())


async def stream(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
    """POST a body and yield the JSON value of each server-sent event, until `[DONE]`.

    Raises the exceptions of `exchange`, including for an event with an error, and `TransientError` if the stream breaks
    off.
    """
    async with _answer(session, "POST", url, body) as response:
        async for line in response.content:
            event = line.strip().removeprefix(b"data:").strip()
            if event == b"[DONE]":
                return
            if not event:
                continue
            value = _parse(event)
            if isinstance(value, dict) and value.get("error"):
                raise refusal(url, _code(value["error"]), event)
            yield value
    raise TransientError("the answer broke off")


@asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response, if its status is 200. Raises the exceptions of `exchange`."""
    data = None if body is None else exact_json.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"Content-Type": "application/json"}
    try:
        async with session.request(method, url, data=data, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                raw = await response.content.read(KEPT_BODY_BYTES)
                retry_after_s = parse_retry_after(response.headers.get("Retry-After"), datetime.now(UTC))
                raise refusal(url, response.status, raw, retry_after_s)
            yield response
    except TimeoutError as error:
        raise Unanswered(f"no answer within {session.timeout.total:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        raise TransientError(f"{type(error).__name__}: {error}") from error


def refusal(url: str, status: int, body: bytes, retry_after_s: float | None = None) -> TransientError | ValueError:
    """The exception for an answer with an error status."""
    reason = f"HTTP {status}: {body[:KEPT_BODY_BYTES].decode(errors='replace')}"
    if is_transient(status):
        return TransientError(reason, retry_after_s)
    return ValueError(f"{url} refuses the request: {reason}")


def _code(error: Any) -> int:
    """The status of an error in the middle of an answer; 500 (a server error) for an error without a status."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise TransientError(f"the answer is not JSON: {raw[:80]!r}") from error
