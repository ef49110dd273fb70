"""Tools that a model may call in its turns: their settings, their definitions, and what a call comes to.

Invariant: what the model does wrong (no such tool, wrong arguments, a malformed call, too many calls) is told to it and
the sample goes on. What a tool does wrong (an exception, no answer in time) costs the sample, with the reason kept, or
is told to the model as well, as the settings say. Neither touches other samples.
"""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from rollq.buffer.errors import ConfigError
from rollq.buffer.plugins import load_plugin
from rollq.buffer.rollouts import Prompt
from rollq.buffer.settings import Settings
from rollq.buffer.settings_errors import explanation
from rollq.workers.agents.built_in_tools import Lookup, calculator
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.environments import Environments, Limits, Opening, Step
from rollq.workers.agents.multi_turn import MultiTurn
from rollq.workers.agents.tool_calls import CallError, Malformed, ToolCall, parse_calls
from rollq.workers.user_code import in_thread, within

BUILT_IN: Final[Mapping[str, Callable[..., Any]]] = {"calculator": calculator, "lookup": Lookup}


class ToolSettings(Settings):
    """One tool: a table of `agent_options.tools`, by the name that the model calls it."""

    function: str | None = Field(
        default=None, description="dotted path of your own; default: the built-in of that name"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="what a tool that is a class is made with")
    timeout_s: float = Field(default=30.0, gt=0, description="longest that a call may take")
    max_calls: int = Field(default=16, gt=0, description="calls in one sample")
    concurrent: int = Field(default=64, gt=0, description="calls at the same time, in one worker")


class ToolsSettings(Settings):
    """`agent_options` of the loop `tools`."""

    tools: dict[str, ToolSettings] = Field(min_length=1)
    max_turns: int = Field(default=8, gt=0, description="of the model in one sample")
    tell_errors: bool = Field(default=False, description="tell the model of tools that fail; else the sample fails")
    max_answer_chars: int = Field(default=4096, gt=0, description="the rest of a tool's answer is cut off")


class ToolError(RuntimeError):
    """A tool failed; says which one, and how."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that can be called. `arguments` is the form of what the model gives it, `definition` what the model is
    told of it, as chat templates want it; `prompt_name` the parameter, if there is one, that gets the sample's prompt.
    """

    settings: ToolSettings
    function: Callable[..., Any]
    arguments: type[BaseModel]
    definition: Message
    prompt_name: str | None
    places: asyncio.Semaphore

    @classmethod
    def of(cls, name: str, settings: ToolSettings) -> "Tool":
        """Raises `ConfigError` when there is no such tool, or its parameters have no types."""
        found = load_plugin("tool", settings.function or name, BUILT_IN)
        function, description = found, inspect.getdoc(found)
        if inspect.isclass(found):
            try:
                made: Any = found(**settings.options)
                function = made.__call__
            except (TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"tool {name!r} cannot be made with options {settings.options!r}: {error}") from error
        elif settings.options:
            raise ConfigError(f"tool {name!r} is a function, it takes no options: leave them out, or make it a class")
        arguments, prompt_name = _arguments(name, function)
        definition = _definition(name, description or "", arguments)
        return cls(settings, function, arguments, definition, prompt_name, asyncio.Semaphore(settings.concurrent))

    @property
    def name(self) -> str:
        """What the model calls it."""
        name: str = self.definition["function"]["name"]
        return name

    async def call(self, given: Mapping[str, Any], prompt: Prompt) -> str:
        """The tool's answer. Waiting for a free place does not count as the tool's time.

        Raises `CallError` when the model is to blame, `ToolError` when the tool is.
        """
        try:
            valid = self.arguments.model_validate(given)
        except ValidationError as error:
            raise CallError(f"wrong arguments for {self.name!r}: {explanation(error, self.arguments)}") from error
        arguments = {name: getattr(valid, name) for name in self.arguments.model_fields}
        if self.prompt_name is not None:
            arguments[self.prompt_name] = prompt
        try:
            answer = await self._run(arguments)
            return answer if isinstance(answer, str) else orjson.dumps(answer).decode()
        except CallError:
            raise
        except TimeoutError as error:
            raise ToolError(
                f"tool {self.name!r}: {str(error) or f'took longer than {self.settings.timeout_s:g} s'}"
            ) from error
        except Exception as error:
            raise ToolError(f"tool {self.name!r}: {type(error).__name__}: {error}") from error

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function, in a thread unless it is async. One that hangs there keeps its place until it ends."""
        await self.places.acquire()
        if inspect.iscoroutinefunction(self.function):
            return await within(self.settings.timeout_s, self.function(**arguments), done=self.places.release)
        async with asyncio.timeout(self.settings.timeout_s):
            return await in_thread(lambda: self.function(**arguments), done=self.places.release)


class _Schema(GenerateJsonSchema):
    """JSON schema without titles, which only repeat names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _definition(name: str, description: str, arguments: type[BaseModel]) -> Message:
    parameters = arguments.model_json_schema(schema_generator=_Schema)
    del parameters["title"]
    words = " ".join(description.partition("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": words, "parameters": parameters}}


def _arguments(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], str | None]:
    """The form of a tool's arguments, from its parameters, and the name of the one that is a `Prompt`."""
    types = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    prompt_name = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in types or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} needs a name and a type of its own")
        if types[parameter.name] is Prompt:
            prompt_name = parameter.name
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (types[parameter.name], default)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields), prompt_name


class ToolEnvironment:
    """The environment whose answers are those of tools. Without a call in it, a turn is the last."""

    def __init__(self, tools: Mapping[str, Tool], settings: ToolsSettings) -> None:
        self._tools = tools
        self._settings = settings
        self._calls: Counter[str] = Counter()

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Tell the model of the tools."""
        self._prompt = prompt
        return Opening(tools=tuple(tool.definition for tool in self._tools.values()))

    async def step(self, text: str) -> Step:
        """Answer all calls of a turn; they run at the same time. Raises `ToolError`."""
        calls = parse_calls(text)
        answers = await asyncio.gather(*(self._answer(call) for call in calls))
        errors = [answer for answer in answers if isinstance(answer, ToolError)]
        if errors and not self._settings.tell_errors:
            raise errors[0]
        messages = (
            {
                "role": "tool",
                "name": call.name if isinstance(call, ToolCall) else "",
                "content": f"error: {answer}"[: self._settings.max_answer_chars]
                if isinstance(answer, Exception)
                else answer[: self._settings.max_answer_chars],
            }
            for call, answer in zip(calls, answers, strict=True)
        )
        return Step(tuple(messages), done=not calls)

    async def _answer(self, call: ToolCall | Malformed) -> str | CallError | ToolError:
        if isinstance(call, Malformed):
            return CallError(call.problem)
        tool = self._tools.get(call.name)
        if tool is None:
            return CallError(f"there is no tool {call.name!r}, there is {', '.join(self._tools)}")
        self._calls[call.name] += 1
        if self._calls[call.name] > tool.settings.max_calls:
            return CallError(f"{call.name!r} may be called {tool.settings.max_calls} times, that is used up")
        try:
            return await tool.call(call.arguments, self._prompt)
        except (CallError, ToolError) as error:
            return error

    async def teardown(self) -> None:
        """Nothing to give back."""


def tools_loop(**options: Any) -> MultiTurn:
    """The loop `tools` from its `agent_options`. Raises `ConfigError` for tools that cannot be had."""
    settings = ToolsSettings(**options)
    tools = {name: Tool.of(name, each) for name, each in settings.tools.items()}
    return MultiTurn(Environments(lambda: ToolEnvironment(tools, settings), Limits(settings.max_turns), nullcontext()))
