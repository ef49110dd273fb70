"""Tools that a model may call: their settings, their definitions and their calls."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from rollq.buffer.common import exact_json
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import explanation
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.built_in_tools import Lookup, calculator
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.mcp.settings import McpOptions
from rollq.workers.agents.tool_calls import CallError
from rollq.workers.user_code.call_slots import CallSlots
from rollq.workers.user_code.calls import called_in_slot, in_thread, within
from rollq.workers.user_code.errors import what_happened

BUILT_IN: Final[Mapping[str, Callable[..., Any]]] = {"calculator": calculator, "lookup": Lookup}


class ToolSettings(McpOptions):
    """One tool: a table in `agent_options.tools`. Its key is the name by which the model calls the tool. With `mcp`,
    the table means all tools of a server, or those in `only`, under the server's names."""

    function: str | None = Field(
        default=None, description="dotted path of a custom tool; default: the built-in tool of this name"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="constructor arguments of a tool that is a class")
    timeout_s: float = Field(default=30.0, gt=0, description="longest time that a call may take, in seconds")
    max_calls: int = Field(default=16, gt=0, description="most calls in one sample")
    concurrent: int = Field(default=64, gt=0, description="most concurrent calls in one worker")


class ToolError(SampleFailed, RuntimeError):
    """A tool failed. The message names the tool and the reason."""

    def __init__(self, reason: str, kind: FailureKind = FailureKind.TOOL) -> None:
        super().__init__(kind, reason)


class ToolLost(SampleFailed):
    """A tool is gone, and with it the sample's state. The model never sees this error."""


class AnyTool(Protocol):
    """A tool that the model may call in one sample."""

    @property
    def settings(self) -> ToolSettings:
        """The tool's settings, with its limits."""

    async def call(self, raw_arguments: Mapping[str, Any], prompt: Prompt) -> str:
        """See `Tool.call`."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that can be called. `arguments` is the schema of its arguments. `definition` describes the tool to the
    model, in the form that chat templates take. `prompt_name` names the parameter that receives the sample's prompt, if
    any.
    """

    settings: ToolSettings
    function: Callable[..., Any]
    arguments: type[BaseModel]
    definition: Message
    prompt_name: str | None
    slots: CallSlots

    @classmethod
    def from_settings(cls, name: str, settings: ToolSettings) -> "Tool":
        """Load a tool. Raises `ConfigError` for an unknown tool and for untyped parameters."""
        plugin = load_plugin("tool", settings.function or name, BUILT_IN)
        function, description = plugin, inspect.getdoc(plugin)
        if inspect.isclass(plugin):
            try:
                tool: Any = plugin(**settings.options)
                function = tool.__call__
            except (TypeError, ValueError, AttributeError) as error:
                raise ConfigError(f"tool {name!r} cannot be made with options {settings.options!r}: {error}") from error
        elif settings.options:
            raise ConfigError(f"tool {name!r} is a function and takes no options: leave them out, or make it a class")
        arguments, prompt_name = _arguments(name, function)
        definition = _definition(name, description or "", arguments)
        return cls(settings, function, arguments, definition, prompt_name, CallSlots(settings.concurrent))

    @property
    def name(self) -> str:
        """The name by which the model calls the tool."""
        name: str = self.definition["function"]["name"]
        return name

    def _parsed(self, raw_arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            valid = self.arguments.model_validate(raw_arguments)
        except ValidationError as error:
            raise CallError(f"wrong arguments for {self.name!r}: {explanation(error, self.arguments)}") from error
        return {name: getattr(valid, name) for name in self.arguments.model_fields}

    async def call(self, raw_arguments: Mapping[str, Any], prompt: Prompt) -> str:
        """The tool's answer as text. Waiting for a free place does not count towards the tool's timeout.

        Raises `CallError` for a mistake by the model, and `ToolError` if the tool fails.
        """
        arguments = self._parsed(raw_arguments)
        if self.prompt_name is not None:
            arguments[self.prompt_name] = prompt
        try:
            answer = await self._run(arguments)
            return answer if isinstance(answer, str) else exact_json.dumps(answer).decode()
        except CallError:
            raise
        except SampleFailed as error:
            raise ToolError(f"tool {self.name!r}: {error}", error.kind) from error
        except Exception as error:
            raise ToolError(f"tool {self.name!r}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return str(error) or f"took longer than {self.settings.timeout_s:g} s"
        return what_happened(error)

    async def _run(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function, in a thread unless it is async. A call that hangs keeps its place until it ends."""
        limit_s = self.settings.timeout_s
        slot = await self.slots.take(limit_s)
        if inspect.iscoroutinefunction(self.function):
            return await called_in_slot(slot, lambda done: within(limit_s, self.function(**arguments), done=done))
        call = partial(self.function, **arguments)
        return await called_in_slot(slot, lambda done: within(limit_s, in_thread(call, done=done)))


class _Schema(GenerateJsonSchema):
    """A JSON schema without titles, which only repeat names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _definition(name: str, description: str, arguments: type[BaseModel]) -> Message:
    parameters = arguments.model_json_schema(schema_generator=_Schema)
    del parameters["title"]
    summary = " ".join(description.partition("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def _arguments(name: str, function: Callable[..., Any]) -> tuple[type[BaseModel], str | None]:
    """The argument schema made from a tool's parameters, and the name of the parameter of type `Prompt`, if any."""
    types = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    prompt_name = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in types or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} needs a type, and cannot be * or **")
        if types[parameter.name] is Prompt:
            prompt_name = parameter.name
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (types[parameter.name], default)
    return create_model(name, __config__=ConfigDict(extra="forbid"), **fields), prompt_name
