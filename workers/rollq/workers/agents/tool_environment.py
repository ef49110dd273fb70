"""The environment of the loop `tools`. It runs the model's calls and answers with their results.

Invariant: the model's mistakes (an unknown tool, wrong arguments, a malformed call, too many calls) are answered with
an error message, and the sample continues. When a tool fails (by an exception or a timeout), the settings decide: the
sample fails and keeps the reason, or the model gets an error message. The loss of an MCP server fails the samples that
had a session with it. Other samples are not affected.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import Field

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.environments import Environments, Limits, Opening, Step
from rollq.workers.agents.mcp.server import McpServer, McpSession
from rollq.workers.agents.multi_turn import FiniteNumber, MultiTurn
from rollq.workers.agents.tool_calls import CallError, Malformed, ToolCall
from rollq.workers.agents.tools import AnyTool, Tool, ToolError, ToolLost, ToolSettings
from rollq.workers.agents.turns import Turn, answer


class ToolsSettings(Settings):
    """`agent_options` of the loop `tools`."""

    tools: dict[str, ToolSettings] = Field(min_length=1, description="tools that the model may call, by name")
    max_turns: int = Field(default=8, gt=0, description="turns of the model in one sample")
    tool_parser: str = Field(
        default="hermes", min_length=1, description="how the model writes calls: auto, or the name of a format"
    )
    reasoning_parser: str = Field(default="", description="how the model writes thoughts: one of vLLM's parsers")
    tell_errors: bool = Field(default=False, description="show a tool's error to the model; otherwise the sample fails")
    unfinished: FiniteNumber | Literal["fail", "judge"] = Field(
        default="judge", description="the reward of a sample that runs out of turns or tokens; fail; or ask the judge"
    )
    max_answer_chars: int = Field(default=4096, gt=0, description="the rest of a tool's answer is cut off")


class ToolEnvironment:
    """An environment that answers with the results of tools. A turn without a call is the last."""

    def __init__(self, offer: "ToolOffer", settings: ToolsSettings, *, verbatim: bool) -> None:
        self._offer = offer
        self._tools: dict[str, AnyTool] = {**offer.tools}
        self._verbatim = verbatim
        self._settings = settings
        self._calls: Counter[str] = Counter()
        self._sessions: list[McpSession] = []

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Offer the tools to the model, and open a session with each MCP server. Raises `SampleFailed` if a server
        refuses a session."""
        self._prompt = prompt
        for server in self._offer.servers:
            self._sessions.append(await server.open())
            self._tools |= self._sessions[-1].tools
        return Opening(tools=tuple(self._offer.definitions.values()))

    async def resume(self, prompt: Prompt, session: str, messages: Sequence[Message]) -> Opening:
        """Like `setup`, after the calls in `messages`, which count towards the limits and are not run again."""
        for message in messages:
            if message["role"] == "tool" and message["name"] in self._offer.definitions:
                self._calls[message["name"]] += 1
        return await self.setup(prompt, session)

    async def respond(self, turn: Turn) -> Step:
        """Run all calls of a turn concurrently, and answer them. Raises `ToolError` and `ToolLost`."""
        calls = turn.calls
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        fatal = (ToolLost,) if self._settings.tell_errors else (ToolLost, ToolError)
        for kind in fatal:
            for error in answers:
                if isinstance(error, kind):
                    raise error
        messages = tuple(map(partial(self._message, turn), calls, answers))
        return Step(messages, done=not calls)

    def _message(self, turn: Turn, call: ToolCall | Malformed, result: str | Exception) -> Message:
        text = result if isinstance(result, str) else f"error: {result}"
        return answer(turn, call, text[: self._settings.max_answer_chars], verbatim=self._verbatim)

    async def _answer(self, call: ToolCall | Malformed) -> str | CallError | ToolError | ToolLost:
        if isinstance(call, Malformed):
            return CallError(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            return CallError(f"there is no tool {call.name!r}; use one of {', '.join(self._offer.definitions)}")
        self._calls[call.name] += 1
        if self._calls[call.name] > tool.settings.max_calls:
            return CallError(f"{call.name!r} may be called {tool.settings.max_calls} times in one sample")
        try:
            return await tool.call(call.arguments, self._prompt)
        except (CallError, ToolError, ToolLost) as error:
            return error

    async def teardown(self) -> None:
        """End the sessions of the sample."""
        await asyncio.gather(*(session.close() for session in self._sessions))


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """One task's tools: functions, MCP servers, and all definitions by name, in the settings' order."""

    tools: Mapping[str, Tool]
    servers: Sequence[McpServer]
    definitions: Mapping[str, Message]

    @classmethod
    def from_settings(cls, settings: Mapping[str, ToolSettings]) -> "ToolOffer":
        """Load functions and list servers' tools. Raises `ConfigError`, including for two tools with the same name."""
        tools: dict[str, Tool] = {}
        servers: list[McpServer] = []
        definitions: dict[str, Message] = {}
        for table, one in settings.items():
            if one.mcp is None:
                tools[table] = Tool.from_settings(table, one)
                new = {table: tools[table].definition}
            else:
                servers.append(McpServer(table, one))
                new = {name: tool.definition for name, tool in servers[-1].listed.tools.items()}
            if repeated := definitions.keys() & new.keys():
                raise ConfigError(f"tools.{table}: there are two tools {min(repeated)!r}: choose with `only`")
            definitions |= new
        return cls(tools, servers, definitions)

    @property
    def is_resumable(self) -> bool:
        """Whether a conversation can continue in another worker, since no server holds the conversation's state."""
        return not any(server.keeps_state for server in self.servers)

    @property
    def most_samples(self) -> int | None:
        """The number of samples that one worker may run at a time if each sample starts processes; None for no
        limit."""
        return min((server.settings.concurrent for server in self.servers if server.has_processes), default=None)


def tools_loop(**options: Any) -> MultiTurn:
    """The loop `tools` from its `agent_options`. Raises `ConfigError` for tools that cannot be loaded."""
    settings = ToolsSettings(**options)
    offer = ToolOffer.from_settings(settings.tools)
    chat_format = make_format(settings.tool_parser, settings.reasoning_parser)

    def make() -> ToolEnvironment:
        return ToolEnvironment(offer, settings, verbatim=chat_format.verbatim)

    limits, unfinished = Limits(settings.max_turns), settings.unfinished
    environments = Environments(make, limits, resumable=offer.is_resumable, give_rewards=False, unfinished=unfinished)
    closing = tuple(server.close for server in offer.servers)
    return MultiTurn(environments, chat_format, offer.most_samples, closing)
