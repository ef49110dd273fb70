"""MCP tools of an OpenEnv environment: their definitions for the model, calls as actions, and answers as text. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.environments.openenv.wire import Observation, Unreadable
from rollq.workers.agents.conversation import Message

LIST_TOOLS: Final[Mapping[str, Any]] = {"type": "list_tools"}


def definitions(listed: Observation) -> tuple[Message, ...]:
    """The tools of an answer to `LIST_TOOLS`, for a chat template. Raises `Unreadable`."""
    try:
        tools = listed.fields["tools"]
        made = tuple(_definition(tool) for tool in tools)
    except (KeyError, TypeError) as error:
        raise Unreadable(f"the environment has no MCP tools: its answer is {dict(listed.fields)!r:.200}") from error
    if not made:
        raise Unreadable(f"the environment lists no MCP tools: {listed.fields.get('metadata')!r:.200}")
    return made


def call_of(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The action that calls a tool."""
    return {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}


def is_mistaken(observation: Observation) -> bool:
    """Whether a call named no tool, or had arguments that its tool does not take."""
    error = observation.fields.get("error")
    return isinstance(error, Mapping) and error.get("error_type") in ("tool_not_found", "invalid_args")


def answer_of(observation: Observation) -> str:
    """The text of a tool's answer, for the model. Raises `Unreadable` if the server did not reach the tool."""
    fields = observation.fields
    error = fields.get("error")
    if isinstance(error, Mapping):
        if error.get("error_type") == "transport_error":
            raise Unreadable(f"the server did not reach the tool: {error.get('message')}")
        return f"error: {error.get('message')}"
    result = fields.get("result")
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        text = "\n".join(_part(part) for part in result["content"])
        return f"error: {text}" if result.get("is_error") or result.get("isError") else text
    return result if isinstance(result, str) else exact_json.dumps(result).decode()


def _definition(tool: Mapping[str, Any]) -> Message:
    schema = tool.get("input_schema") or tool.get("inputSchema") or {"type": "object", "properties": {}}
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _part(part: Any) -> str:
    return part["text"] if isinstance(part, Mapping) and isinstance(part.get("text"), str) else str(part)
