"""The environment of the loop `tools`: it runs the calls that the model writes, and answers with their results.

Invariant: a mistake of the model (unknown tool, wrong arguments, a malformed call, too many calls) is answered with an
error message, and the sample continues. A failure of a tool (an exception, a timeout) fails the sample with the reason
kept, or is answered too, as the settings say. Neither affects other samples.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.environments import Environments, Limits, Opening, Step
from rollq.workers.agents.multi_turn import FiniteNumber, MultiTurn
from rollq.workers.agents.tool_calls import CallError, Malformed, ToolCall
from rollq.workers.agents.tools import Tool, ToolError, ToolSettings
from rollq.workers.agents.turns import Turn, answer


class ToolsSettings(Settings):
    """`agent_options` of the loop `tools`."""

    tools: dict[str, ToolSettings] = Field(min_length=1, description="tools that the model may call, by name")
    max_turns: int = Field(default=8, gt=0, description="of the model in one sample")
    tool_parser: str = Field(
        default="hermes", min_length=1, description="how the model writes calls: auto, or the name of a format"
    )
    reasoning_parser: str = Field(default="", description="how the model writes thoughts: one of vLLM's")
    tell_errors: bool = Field(default=False, description="show a tool's error to the model; otherwise the sample fails")
    unfinished: FiniteNumber | Literal["fail", "judge"] = Field(
        default="judge", description="the reward of a sample that runs out of turns or tokens; fail; or ask the judge"
    )
    max_answer_chars: int = Field(default=4096, gt=0, description="the rest of a tool's answer is cut off")


class ToolEnvironment:
    """An environment that answers with the results of tools. A turn without a call is the last."""

    def __init__(self, tools: Mapping[str, Tool], settings: ToolsSettings, *, verbatim: bool) -> None:
        self._tools = tools
        self._verbatim = verbatim
        self._settings = settings
        self._calls: Counter[str] = Counter()

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Give the model the tools."""
        self._prompt = prompt
        return Opening(tools=tuple(tool.definition for tool in self._tools.values()))

    async def resume(self, prompt: Prompt, session: str, messages: Sequence[Message]) -> Opening:
        """Give the model the tools, with the calls that it has made already. None is run again."""
        for message in messages:
            if message["role"] == "tool" and message["name"] in self._tools:
                self._calls[message["name"]] += 1
        return await self.setup(prompt, session)

    async def respond(self, turn: Turn) -> Step:
        """Answer all calls of a turn, which run concurrently. Raises `ToolError`."""
        calls = turn.calls
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        errors = [answer for answer in answers if isinstance(answer, ToolError)]
        if errors and not self._settings.tell_errors:
            raise errors[0]
        messages = tuple(self._message(turn, call, answer) for call, answer in zip(calls, answers, strict=True))
        return Step(messages, done=not calls)

    def _message(self, turn: Turn, call: ToolCall | Malformed, result: str | CallError | ToolError) -> Message:
        text = result if isinstance(result, str) else f"error: {result}"
        return answer(turn, call, text[: self._settings.max_answer_chars], verbatim=self._verbatim)

    async def _answer(self, call: ToolCall | Malformed) -> str | CallError | ToolError:
        if isinstance(call, Malformed):
            return CallError(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            return CallError(f"there is no tool {call.name!r}, use one of {', '.join(self._tools)}")
        self._calls[call.name] += 1
        if self._calls[call.name] > tool.settings.max_calls:
            return CallError(f"{call.name!r} may be called {tool.settings.max_calls} times in one sample")
        try:
            return await tool.call(call.arguments, self._prompt)
        except (CallError, ToolError) as error:
            return error

    async def teardown(self) -> None:
        """Release nothing: tools hold no resources per sample."""


def tools_loop(**options: Any) -> MultiTurn:
    """The loop `tools` from its `agent_options`. Raises `ConfigError` for tools that cannot be loaded."""
    settings = ToolsSettings(**options)
    tools = {name: Tool.from_settings(name, tool) for name, tool in settings.tools.items()}
    chat_format = make_format(settings.tool_parser, settings.reasoning_parser)

    def make() -> ToolEnvironment:
        return ToolEnvironment(tools, settings, verbatim=chat_format.verbatim)

    limits, unfinished = Limits(settings.max_turns), settings.unfinished
    environments = Environments(make, limits, resumable=True, give_rewards=False, unfinished=unfinished)
    return MultiTurn(environments, chat_format)
