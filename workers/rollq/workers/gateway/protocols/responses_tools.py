"""The model's and the caller's names for the tools of OpenAI's responses. Pure.

A tool in a namespace has one name for the model, and two fields for the caller. A custom tool takes a string, which the
model writes as a function's only argument.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.protocols import fields

CUSTOM_INPUT: Final = "input"
"""The argument of a custom tool."""
_BETWEEN: Final = "__"
_CUSTOM_PARAMETERS: Final = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
}


def joined(namespace: str, name: str) -> str:
    """The model's name for a tool in a namespace."""
    return namespace.removesuffix(_BETWEEN) + _BETWEEN + name


def definitions(body: Mapping[str, Any]) -> tuple[tuple[Message, ...], list[str]]:
    """Definitions as in chat completions, and the names of omitted parts: the server's tools, and grammars."""
    definitions, left_out = [], []
    for where, namespace, tool in _tools(body.get("tools"), "tools", None):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            left_out.append(f"tools.{fields.label(kind)}")
            continue
        name = _name(tool, where, namespace)
        parameters = tool.get("parameters") if kind == "function" else _CUSTOM_PARAMETERS
        definitions.append(fields.definition(name, tool.get("description"), parameters, where))
        if kind == "custom" and tool.get("format") not in (None, {"type": "text"}):
            left_out.append("tools.custom.format")
    return tuple(definitions), left_out


def callers_names(body: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The model's name for each tool -> the type, name and namespace of items that call the tool."""
    names = {}
    for where, namespace, tool in _tools(body.get("tools"), "tools", None):
        if tool.get("type") in ("function", "custom"):
            item = {"type": f"{'custom_tool' if tool['type'] == 'custom' else 'function'}_call", "name": tool["name"]}
            names[_name(tool, where, namespace)] = item if namespace is None else {**item, "namespace": namespace}
    return names


def _tools(tools: Any, name: str, namespace: str | None) -> Iterator[tuple[str, str | None, Mapping[str, Any]]]:
    """Each tool's position in the request, its namespace or None, and its definition."""
    for place, raw in enumerate(fields.items(tools, name)):
        where = f"{name}[{place}]"
        tool = fields.mapping(raw, where)
        if tool.get("type") == "namespace" and namespace is None:
            yield from _tools(tool.get("tools"), f"{where}.tools", fields.nonempty(tool.get("name"), f"{where}.name"))
        else:
            yield where, namespace, tool


def _name(tool: Mapping[str, Any], where: str, namespace: str | None) -> str:
    name = fields.nonempty(tool.get("name"), f"{where}.name")
    return name if namespace is None else joined(namespace, name)
