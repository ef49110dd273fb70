"""An MCP server's tools in one worker: the tool list at the start, and a session for each sample.

Invariant: a sample keeps the session that it got when it started. If the session is lost, the sample fails. Later
samples get a new session, and a command that has ended is restarted.
"""

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, TextIO

from rollq.buffer.common.backoff import backoff_s
from rollq.buffer.errors import ConfigError
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.mcp.settings import header_values
from rollq.workers.agents.mcp.tool_lists import ToolList, ToolSchema
from rollq.workers.agents.tool_calls import CallError
from rollq.workers.agents.tools import ToolError, ToolLost, ToolSettings
from rollq.workers.user_code.call_slots import CallSlots
from rollq.workers.user_code.calls import called_in_slot, within
from rollq.workers.user_code.errors import what_happened

if TYPE_CHECKING:
    import httpx2
    from mcp.client import Transport

    from rollq.workers.agents.mcp.connection import Connection

ALIVE_S: Final = 10.0
"""After a call has timed out, a server that does not answer for this many seconds counts as hanging."""
FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 2.0
SETUPS: Final = 64
"""The most connections for setting up sessions. Each running call may use one more."""
TAIL_CHARS: Final = 500


class McpServer:
    """The server of one tool table in the settings. Its constructor lists the server's tools."""

    def __init__(self, name: str, settings: ToolSettings) -> None:
        """Raises `ConfigError` if the server does not start or answer, or if a tool cannot be offered."""
        self.name = name
        self.settings = settings
        self.slots = CallSlots(settings.concurrent)
        self._http: httpx2.AsyncClient | None = None
        self._shared: Connection | None = None
        self._starting = asyncio.Lock()
        try:
            import rollq.workers.agents.mcp.connection  # noqa: F401 - needs the package
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"tools.{name}: MCP servers need the package {error.name!r}: pip install 'rollq[mcp]'"
            ) from error
        try:
            self._headers = header_values(settings.headers)
            self.listed = self._list()
        except ConfigError as error:
            raise ConfigError(f"tools.{name}: MCP server {settings.mcp!r}: {error}") from error

    @property
    def keeps_state(self) -> bool:
        """Whether each sample has a separate session. Another worker cannot continue a session."""
        return not self.settings.is_shared

    @property
    def has_processes(self) -> bool:
        """Whether each sample starts a process."""
        return self.keeps_state and self.settings.mcp_url is None

    async def open(self) -> "McpSession":
        """A session for one sample. Raises `SampleFailed` if the server is unreachable or its tools have changed."""
        from rollq.workers.agents.mcp.connection import ConnectionLost

        try:
            connection = await (self._common() if self.settings.is_shared else self._new())
        except ConnectionLost as error:
            raise SampleFailed(FailureKind.TOOL, f"MCP server {self.name!r}: {error}") from error
        return McpSession(self, connection)

    async def leave(self, connection: "Connection") -> None:
        """End a session, unless other samples share its connection."""
        if not self.settings.is_shared:
            await connection.close()

    async def look_after(self, connection: "Connection") -> None:
        """After a call has timed out, give up the shared connection if its server hangs."""
        if self.settings.is_shared and not await connection.answers(ALIVE_S):
            await connection.close()

    async def close(self) -> None:
        """Close the connection that samples share."""
        if self._shared is not None:
            await self._shared.close()
        if self._http is not None:
            await self._http.aclose()
        self._shared = self._http = None

    async def _common(self) -> "Connection":
        """Return the connection that samples share. Open a new one if the server has ended or hangs."""
        from rollq.workers.agents.mcp.connection import ConnectionLost

        async with self._starting:
            if self._shared is not None:
                try:
                    await self._check(self._shared)
                except ConnectionLost:
                    await self._shared.close()
                    self._shared = None
            if self._shared is None:
                self._shared = await self._new()
            return self._shared

    async def _new(self) -> "Connection":
        connection = await self._connect(self._transport(self._client(), sys.__stderr__ or sys.stderr))
        try:
            await self._check(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _check(self, connection: "Connection") -> None:
        """Raise `SampleFailed` if the server's tools have changed since this worker started."""
        try:
            found = ToolList.of(await connection.list_tools(self.settings.start_timeout_s), self.settings.only)
            changes = self.listed.changes(found)
        except ConfigError as error:
            changes = str(error)
        if changes:
            reason = f"the tools of MCP server {self.name!r} have changed since this worker started ({changes})"
            raise SampleFailed(FailureKind.TOOL, f"{reason}: restart the workers")

    async def _connect(self, transport: "Callable[[], Transport]") -> "Connection":
        """Connect, waiting for the server to start if necessary. Raises `ConnectionLost`."""
        from rollq.workers.agents.mcp.connection import Connection, ServerNotThere

        deadline_s, failures = monotonic() + self.settings.start_timeout_s, 0
        while True:
            try:
                return await Connection.open(transport, max(0.0, deadline_s - monotonic()))
            except ServerNotThere:
                failures += 1
                pause_s = backoff_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=0)
                if monotonic() + pause_s >= deadline_s:
                    raise
                await asyncio.sleep(pause_s)

    def _client(self) -> "httpx2.AsyncClient | None":
        from rollq.workers.agents.mcp.connection import http_client

        if self.settings.mcp_url is not None and self._http is None:
            self._http = http_client(self._headers, self.settings.concurrent + SETUPS)
        return self._http

    def _transport(self, client: "httpx2.AsyncClient | None", errors: TextIO) -> "Callable[[], Transport]":
        from rollq.workers.agents.mcp.connection import command_transport, url_transport

        if client is not None and self.settings.mcp_url is not None:
            return url_transport(self.settings.mcp_url, client)
        return command_transport(self.settings.mcp_command, self.settings.env, self.settings.folder, errors)

    def _list(self) -> ToolList:
        """The server's tool list. Runs in a thread, since the caller may or may not have an event loop."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._list_once()).result()

    async def _list_once(self) -> ToolList:
        from rollq.workers.agents.mcp.connection import ConnectionLost

        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                async with self.trial(errors) as connection:
                    return ToolList.of(await connection.list_tools(self.settings.start_timeout_s), self.settings.only)
            except ConnectionLost as error:
                errors.seek(0)
                said = errors.read().strip()[-TAIL_CHARS:]
                raise ConfigError(f"{error}; it wrote: {said}" if said else str(error)) from error

    @asynccontextmanager
    async def trial(self, errors: TextIO) -> "AsyncIterator[Connection]":
        """Yield a connection that no other session shares. Raises `ConnectionLost`."""
        from rollq.workers.agents.mcp.connection import http_client

        client = None if self.settings.mcp_url is None else http_client(self._headers, SETUPS)
        try:
            connection = await self._connect(self._transport(client, errors))
            try:
                yield connection
            finally:
                await connection.close()
        finally:
            if client is not None:
                await client.aclose()


@dataclass(frozen=True, slots=True)
class McpSession:
    """The session of one sample."""

    server: McpServer
    connection: "Connection"

    @property
    def tools(self) -> "dict[str, McpTool]":
        """The tools in this session, by name."""
        return {name: McpTool(schema, self) for name, schema in self.server.listed.tools.items()}

    async def close(self) -> None:
        """End the session."""
        await self.server.leave(self.connection)


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server, in the session of one sample."""

    schema: ToolSchema
    session: McpSession

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        return self.schema.name

    @property
    def settings(self) -> ToolSettings:
        """The settings of its server."""
        return self.session.server.settings

    @property
    def definition(self) -> Message:
        """The description for the model."""
        return self.schema.definition

    async def call(self, raw_arguments: Mapping[str, Any], prompt: Prompt) -> str:
        """The tool's answer as text. Waiting for a free place does not count towards the tool's timeout.

        Raises `CallError` if the model makes a mistake or the answer is an error, `ToolError` if the tool fails, and
        `ToolLost` if the session has ended.
        """
        from rollq.workers.agents.mcp.connection import ConnectionLost

        self.schema.check_arguments(raw_arguments)
        server, connection, limit_s = self.session.server, self.session.connection, self.settings.timeout_s
        try:
            slot = await server.slots.take(limit_s)
            call = connection.call(self.name, raw_arguments)
            return await called_in_slot(slot, lambda done: within(limit_s, call, done=done))
        except CallError:
            raise
        except ConnectionLost as error:
            raise ToolLost(
                FailureKind.TOOL, f"tool {self.name!r}: the session with MCP server {server.name!r} is lost: {error}"
            ) from error
        except TimeoutError as error:
            await server.look_after(connection)
            raise ToolError(f"tool {self.name!r}: took longer than {limit_s:g} s") from error
        except Exception as error:
            raise ToolError(f"tool {self.name!r}: {what_happened(error)}") from error
