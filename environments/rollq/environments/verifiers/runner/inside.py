"""The harness `inside`: a conversation of the model with a task's MCP tools, without a separate process."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp
from mcp import Client, MCPError
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import HarnessError, ToolsetError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import mcp_client, mcp_content_to_chat_content
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["Inside"]

OVERFLOW = "context_length_exceeded"
"""The error code of a call whose prompt exceeds the model's context."""
AGAIN = (429, 502, 503, 504)
"""Statuses after which a call is retried."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0)

Message = dict[str, Any]


class InsideConfig(HarnessConfig):
    """The harness's config, which verifiers finds through the class."""


class Inside(Harness[InsideConfig]):
    """Chat and MCP tools. The model runs no code here."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """See `Harness.launch`."""
        chat = Chat(connections(), f"{endpoint}/chat/completions", secret, ctx.model, trace)
        async with AsyncExitStack() as stack:
            tools = await Tools.open(mcp_urls, self.config, stack)
            await converse(chat, tools, self._opening(data))
        return ProgramResult(exit_code=0, stdout="", stderr="")

    def _opening(self, data: TaskData) -> list[Message]:
        system, prompt = self.resolve_prompt(data)
        first: list[Message] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*first, {"role": "user", "content": prompt}]
        return [*first, *(message_to_wire(message) for message in prompt or ())]


_connections: WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = WeakKeyDictionary()


def connections() -> aiohttp.ClientSession:
    """The connections of all episodes, since verifiers makes a harness for each."""
    loop = asyncio.get_running_loop()
    if loop not in _connections:
        unlimited = aiohttp.ClientTimeout(total=None)
        _connections[loop] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=unlimited)
    return _connections[loop]


class Chat:
    """The model's endpoint in one episode."""

    def __init__(self, http: aiohttp.ClientSession, url: str, secret: str, model: str, trace: Trace) -> None:
        self._http, self._url, self._model, self._trace = http, url, model, trace
        self._headers = {"Authorization": f"Bearer {secret}"}

    async def answer(self, messages: list[Message], tools: list[Message]) -> Message | None:
        """The model's next message; None if a limit has been reached. Raises `HarnessError`."""
        body = {"model": self._model, "messages": messages, **({"tools": tools} if tools else {})}
        for pause_s in (*PAUSES_S, None):
            try:
                async with self._http.post(self._url, json=body, headers=self._headers) as response:
                    status, text = response.status, await response.text()
            except aiohttp.ClientError as error:
                raise HarnessError(f"the call to the model failed: {error}") from error
            if status == 200:
                message: Message = json.loads(text)["choices"][0]["message"]
                return message
            if self._trace.stop_condition is not None or OVERFLOW in text:
                return None
            if status not in AGAIN or pause_s is None:
                break
            await asyncio.sleep(pause_s)
        raise HarnessError(f"the call to the model failed with status {status}: {text[:500]}")


class Tools:
    """The tools of one episode's MCP servers."""

    def __init__(self, clients: Mapping[str, tuple[Client, str]], schemas: list[Message]) -> None:
        self._clients, self.schemas = clients, schemas

    @classmethod
    async def open(cls, urls: Mapping[str, str], config: HarnessConfig, stack: AsyncExitStack) -> "Tools":
        """The tools at these URLs, by server name. Raises `ToolsetError`."""
        clients: dict[str, tuple[Client, str]] = {}
        schemas: list[Message] = []
        hidden = set(config.disabled_tools or ())
        for server, url in urls.items():
            try:
                spec = {"url": url, "timeout": config.tool_timeout}
                client = await stack.enter_async_context(mcp_client(spec))
                listed = await client.list_tools()
            except Exception as error:
                raise ToolsetError(f"the tools of {server or url} cannot be listed: {error}") from error
            for tool in listed.tools:
                name = f"{server}_{tool.name}" if server else tool.name
                if name in clients:
                    raise ToolsetError(f"two tools are called {name}")
                if name in hidden:
                    continue
                clients[name] = client, tool.name
                function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
                schemas.append({"type": "function", "function": function})
        return cls(clients, schemas)

    async def result(self, call: Mapping[str, Any]) -> Message:
        """The message with a call's result, or with an error for the model to read. A call is never repeated, since it
        may have changed something. Raises `ToolsetError` for a lost server."""
        name = str(call["function"]["name"])
        return {"role": "tool", "tool_call_id": call["id"], "content": await self._content(name, call)}

    async def _content(self, name: str, call: Mapping[str, Any]) -> str | list[Message]:
        if name not in self._clients:
            return f"error: there is no tool {name!r}; the tools are: {', '.join(self._clients)}"
        try:
            arguments = json.loads(call["function"].get("arguments") or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments are not a JSON object"
        client, raw = self._clients[name]
        try:
            result = await client.call_tool(raw, arguments)
        except MCPError as error:
            return f"error: {error}"
        except Exception as error:
            raise ToolsetError(f"tool {name}: {type(error).__name__}: {error}") from error
        return mcp_content_to_chat_content(result.content) if result.content else ""


async def converse(chat: Chat, tools: Tools, messages: list[Message]) -> None:
    """Let the model talk and call tools until it answers without a call, or a limit is reached."""
    while (message := await chat.answer(messages, tools.schemas)) is not None:
        messages.append({key: value for key, value in message.items() if value is not None})
        calls = message.get("tool_calls") or []
        if not calls:
            return
        messages.extend([await tools.result(call) for call in calls])
