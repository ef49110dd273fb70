"""Connections to MCP servers. A separate task opens, holds and closes each: MCP's SDK requires a single task, while a
sample is set up in one task and torn down in another.

Invariant: no request is sent twice. A lost connection stays lost.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TextIO, TypeVar

import httpx2
from anyio import BrokenResourceError, ClosedResourceError
from mcp import StdioServerParameters
from mcp.client import Client, ClientSession, Transport
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    UNSUPPORTED_PROTOCOL_VERSION,
    CallToolResult,
    Implementation,
    PaginatedRequestParams,
    Tool,
)

from rollq.buffer.common.child_processes import INHERITED, bare_python
from rollq.buffer.errors import RollqError
from rollq.workers.agents.mcp import launcher
from rollq.workers.agents.mcp.results import result_text
from rollq.workers.agents.tool_calls import CallError
from rollq.workers.user_code.errors import what_happened

T = TypeVar("T")

CLOSE_S: Final = 8.0
"""How many seconds a connection may take to close. The SDK kills a process that does not end within 4 s."""
CONNECT_S: Final = 10.0
MOST_PAGES: Final = 100
LOST_CODES: Final = (CONNECTION_CLOSED, INVALID_REQUEST)
"""Error codes after which a session is gone. INVALID_REQUEST means that the server does not recognise the
session."""
MISTAKE_CODES: Final = (INVALID_PARAMS, METHOD_NOT_FOUND)
"""Error codes for the model's mistakes: an unknown tool, or arguments that the server refuses."""

for _name in ("mcp", "httpx2"):  # they log errors that rollq reports anyway, and addresses, which may be secret
    logging.getLogger(_name).setLevel(logging.CRITICAL)


class ConnectionLost(RollqError):
    """The server has ended, does not answer, or has forgotten the session."""


NOT_THERE = (httpx2.ConnectTimeout, httpx2.NetworkError, httpx2.RemoteProtocolError)
"""Errors from a server that has not started or is about to end."""


class ServerNotThere(ConnectionLost):
    """Nothing answers at the URL yet."""


class Connection:
    """A session with a server, from `open` to `close`."""

    def __init__(self, transport: Callable[[], Transport]) -> None:
        self._transport = transport
        self._ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._holder = asyncio.create_task(self._hold())

    @classmethod
    async def open(cls, transport: Callable[[], Transport], limit_s: float) -> "Connection":
        """Connect. Raises `ConnectionLost`."""
        connection = cls(transport)
        try:
            either: list[asyncio.Future[Any]] = [connection._ready, connection._holder]
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not connection._ready.done():
                raise connection._failure() or ConnectionLost(f"it did not answer within {limit_s:g} s")
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _hold(self) -> None:
        """Hold the connection, and a session if the server has sessions; newer revisions of MCP have none."""
        try:
            await self._keep("legacy")
        except BaseException as error:
            if self._ready.done() or _code(error) != UNSUPPORTED_PROTOCOL_VERSION:
                raise
            await self._keep("auto")

    async def _keep(self, mode: str) -> None:
        client_info = Implementation(name="rollq", version=version("rollq"))
        client = Client(self._transport(), mode=mode, client_info=client_info, cache=None)
        async with client:
            self._ready.set_result(client.session)
            await self._closing.wait()

    async def list_tools(self, limit_s: float) -> list[Tool]:
        """All tools of the server. Raises `ConnectionLost`."""
        tools: list[Tool] = []
        cursor = None
        for _ in range(MOST_PAGES):
            try:
                async with asyncio.timeout(limit_s):
                    params = None if cursor is None else PaginatedRequestParams(cursor=cursor)
                    page = await self._answer(self._ready.result().list_tools(params=params))
            except TimeoutError as error:
                raise ConnectionLost(f"it did not list its tools within {limit_s:g} s") from error
            except MCPError as error:
                raise ConnectionLost(f"it did not list its tools: {error}") from error
            tools.extend(page.tools)
            cursor = page.next_cursor
            if cursor is None:
                break
        return tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A tool's answer as text. Raises `CallError`, which the model sees, if the answer is an error;
        `ConnectionLost`; and the SDK's exceptions for the server's other errors."""
        try:
            result = await self._answer(self._ready.result().call_tool(name, dict(arguments)))
        except MCPError as error:
            if error.code in MISTAKE_CODES:
                raise CallError(str(error)) from error
            raise
        assert isinstance(result, CallToolResult)  # the SDK raises an error for other kinds
        text = result_text(result.model_dump(mode="json", by_alias=True, exclude_none=True))
        if result.is_error:
            raise CallError(text)
        return text

    async def answers(self, limit_s: float) -> bool:
        """Whether the server answers within `limit_s`."""
        with suppress(ConnectionLost, MCPError, TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._answer(self._ready.result().list_tools())
                return True
        return False

    async def _answer(self, request: Coroutine[Any, Any, T]) -> T:
        """Await the answer to a request while the connection lasts."""
        asking = asyncio.ensure_future(request)
        try:
            await asyncio.wait([asking, self._holder], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.wait([asking])
        try:
            return asking.result()
        except (asyncio.CancelledError, BrokenResourceError, ClosedResourceError) as error:
            raise self._lost("the connection was closed") from error
        except MCPError as error:
            if error.code in LOST_CODES:
                await asyncio.sleep(0)  # the holder may be about to report the reason
                raise self._lost(str(error)) from error
            raise

    def _lost(self, reason: str) -> ConnectionLost:
        """Give up the connection, and return the error. `reason` is used if the holder reports none."""
        failure = self._failure() or ConnectionLost(reason)
        self._closing.set()
        return failure

    def _failure(self) -> ConnectionLost | None:
        """The error that ended the holder; None if it still runs or reported no reason."""
        if not self._holder.done() or self._holder.cancelled() or (error := self._holder.exception()) is None:
            return None
        first = _first(error)
        if isinstance(first, MCPError) and first.code == CONNECTION_CLOSED:
            return ConnectionLost("it has ended")
        lost = ServerNotThere if isinstance(first, NOT_THERE) else ConnectionLost
        return lost(what_happened(first))

    async def close(self) -> None:
        """Close the session, and end the server if this connection started its process."""
        self._closing.set()
        try:
            await asyncio.wait([self._holder], timeout=CLOSE_S)
        finally:
            self._holder.cancel()
            self._holder.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # its error is seen
        await asyncio.wait([self._holder], timeout=CLOSE_S)


def _first(error: BaseException) -> BaseException:
    """The first error in an error group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _code(error: BaseException) -> int | None:
    first = _first(error)
    return first.code if isinstance(first, MCPError) else None


def command_transport(
    command: list[str], env: Mapping[str, str], folder: Path | None, errors: TextIO
) -> Callable[[], Transport]:
    """A transport to a command's process in a folder, with a clean environment. The process writes errors to
    `errors`."""
    clean = {name: os.environ[name] for name in INHERITED if name in os.environ}
    program, *arguments = bare_python(launcher.__name__, os.getpid(), *command)
    process = StdioServerParameters(command=program, args=arguments, env={**clean, **env}, cwd=folder)
    return lambda: stdio_client(process, errors)


def http_client(headers: Mapping[str, str], most: int) -> httpx2.AsyncClient:
    """A client for all of a worker's sessions, with at most `most` connections."""
    inner = httpx2.AsyncHTTPTransport(limits=httpx2.Limits(max_connections=most))
    timeout = httpx2.Timeout(None, connect=CONNECT_S)
    return httpx2.AsyncClient(headers=dict(headers), transport=_PostsOnly(inner), timeout=timeout)


def url_transport(url: str, client: httpx2.AsyncClient) -> Callable[[], Transport]:
    """A transport to a URL."""
    return lambda: streamable_http_client(url, http_client=client)


class _PostsOnly(httpx2.AsyncBaseTransport):
    """Refuses the stream that each session would keep open for messages that nobody reads. With 512 sessions, these
    streams exceed the limit on open files."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, or refuse the stream."""
        if request.method == "GET":
            return httpx2.Response(405, request=request)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._inner.aclose()
