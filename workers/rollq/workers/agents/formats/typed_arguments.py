"""Arguments that are written as text, without quotes, typed by the JSON schema of the tool. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import Malformed, ToolCall, call_id

PYTHON: Final[Mapping[str, Any]] = {"True": True, "False": False, "None": None}
"""Values as the template of Qwen3-Coder writes them."""


def typed_call(
    name: str, written: Iterable[tuple[str, str]], tools: Sequence[Message], text: str, index: int
) -> ToolCall | Malformed:
    """Call number `index` of the turn `text`, with the arguments as `written`, each a name and a text.

    A string of the schema stays as it is written. Other values are JSON; one that is not stays a text, for the tool to
    refuse. Without a schema a value is JSON if it can be, and else a text.
    """
    if not name:
        return Malformed("a tool call without the name of the tool")
    schemas = _schemas(name, tools)
    arguments = {key: _typed(value, schemas.get(key)) for key, value in written}
    try:
        raw_arguments = orjson.dumps(arguments).decode()
    except TypeError as error:  # half of a surrogate pair
        return Malformed(f"the arguments of {name!r} cannot be JSON: {error}")
    return ToolCall(name, arguments, call_id(text, index), raw_arguments)


def _typed(value: str, schema: Any) -> Any:
    types = _types(schema)
    if "string" in types and not (value == "null" and "null" in types):
        return value
    if value in PYTHON and types:
        return PYTHON[value]
    try:
        return orjson.loads(value)
    except ValueError:
        return value


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names, also as alternatives or by the values that it allows; none if it does not."""
    if not isinstance(schema, Mapping):
        return set()
    written = schema.get("type", [])
    types = {written} if isinstance(written, str) else set(written)
    for alternatives in ("anyOf", "oneOf", "allOf"):
        types = types.union(*map(_types, schema.get(alternatives, [])))
    if not types and any(isinstance(value, str) for value in schema.get("enum", [])):
        return {"string"}
    return types


def _schemas(name: str, tools: Sequence[Message]) -> Mapping[str, Any]:
    """The schemas of a tool's parameters; none for an unknown tool."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}
