"""Converts messages and tools to the forms that the model's chat template takes. Pure.

Clients and rows write a tool call's arguments as JSON or as a mapping. Most templates convert a mapping to JSON, and
would quote or refuse arguments in JSON. A few take only JSON. Each template renders a trial call, whose result decides
the form of all messages.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.workers.agents.tool_calls import ID_LENGTH
from rollq.workers.engines.protocol import Tokenizer

NAME: Final = "name_of_a_tool"
ARGUMENTS: Final[Mapping[str, Any]] = {"name_of_an_argument": True}
USER: Final[Mapping[str, Any]] = {"role": "user", "content": "-"}


@dataclass(frozen=True, slots=True)
class TemplateForms:
    """The forms that a chat template takes. With `json_arguments`, calls' arguments are JSON, not a mapping. With
    `descriptions`, every tool must have a description."""

    json_arguments: bool = False
    descriptions: bool = False

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, tokenizer: Tokenizer) -> "TemplateForms":
        """The forms that the tokenizer's chat template takes; the usual forms if the template renders no calls."""
        descriptions = not _accepts(tokenizer, [USER], [_tool()]) and _accepts(tokenizer, [USER], [_tool("-")])
        shows_json = not _shows_call(tokenizer, dict(ARGUMENTS)) and _shows_call(tokenizer, _as_json(ARGUMENTS))
        return cls(shows_json, descriptions)

    def message(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """The message in these forms."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or not calls:
            return message
        return {**message, "tool_calls": [self._call(call) for call in calls]}

    def tool(self, tool: Mapping[str, Any]) -> Mapping[str, Any]:
        """The tool's definition in these forms."""
        function = tool.get("function")
        if not self.descriptions or not isinstance(function, Mapping) or function.get("description") is not None:
            return tool
        return {**tool, "function": {**function, "description": ""}}

    def _call(self, call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        function = call.get("function", call)  # templates also read calls without this level
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        changed = {**function, "arguments": self._arguments(function["arguments"])}
        return {**call, "function": changed} if "function" in call else changed

    def _arguments(self, given: Any) -> Any:
        if self.json_arguments:
            return given if isinstance(given, str) else _as_json(given)
        return _as_value(given) if isinstance(given, str) else given


def for_template(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The messages in the forms that the tokenizer's chat template takes."""
    if not any(message.get("tool_calls") for message in messages):
        return tuple(messages)
    forms = TemplateForms.of(tokenizer)  # type: ignore[arg-type]  # hashed by identity
    return tuple(map(forms.message, messages))


def tools_for_template(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The tool definitions in the forms that the tokenizer's chat template takes."""
    if all(tool.get("function", {}).get("description") is not None for tool in tools):
        return tuple(tools)
    forms = TemplateForms.of(tokenizer)  # type: ignore[arg-type]  # hashed by identity
    return tuple(map(forms.tool, tools))


def _as_value(text: str) -> Any:
    """The value of a JSON text; the text itself if it is not JSON, or is a JSON string."""
    try:
        value = exact_json.loads(text)
    except ValueError:
        return text
    return text if isinstance(value, str) else value


def _as_json(value: Any) -> str:
    """A value as JSON, with the spaces that templates write."""
    return json.dumps(value, ensure_ascii=False)


def _shows_call(tokenizer: Tokenizer, arguments: Any) -> bool:
    """Whether the chat template renders a call with these arguments, and not as Python's repr of a mapping."""
    call = {"id": "0" * ID_LENGTH, "type": "function", "function": {"name": NAME, "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": NAME, "tool_call_id": call["id"], "content": "-"}
    try:
        rendered = tokenizer.render([USER, turn, result])
    except Exception:  # noqa: BLE001 - templates raise what they like
        return False
    return all(key in rendered for key in ARGUMENTS) and repr(arguments) not in rendered


def _accepts(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    try:
        tokenizer.render(messages, tools)
    except Exception:  # noqa: BLE001 - templates raise what they like
        return False
    return True


def _tool(description: str | None = None) -> Mapping[str, Any]:
    described = {} if description is None else {"description": description}
    parameters = {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": NAME, **described, "parameters": parameters}}
