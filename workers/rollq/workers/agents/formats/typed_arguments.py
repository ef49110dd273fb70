"""Arguments written as text without quotes, typed by the tool's JSON schema. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from rollq.buffer.common import exact_json
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.json_calls import name_problem
from rollq.workers.agents.tool_calls import Malformed, ToolCall, call_id, parse_arguments

PYTHON: Final[Mapping[str, str]] = {"True": "true", "False": "false", "None": "null"}
"""Values in the spelling of Qwen3-Coder's template -> in JSON."""


def parsed_call(
    name: str, body: str, argument: re.Pattern[str], form: str, tools: Sequence[Message], text: str, index: int
) -> ToolCall | Malformed:
    """Like `typed_call`, with the arguments in `body`. Each argument matches `argument`, whose groups are its name and
    its text. `form` describes an argument to the model."""
    place, end = 0, len(body.rstrip())
    written = []
    while place < end:
        match = argument.match(body, place)
        if match is None:
            wrong = body[place : place + 50].strip()
            return Malformed(f"an argument of {name!r} is {form}; this is not: {wrong!r}")
        written.append((match[1].strip(), match[2]))
        place = match.end()
    return typed_call(name, written, tools, text, index)


def typed_call(
    name: str, written: Iterable[tuple[str, str]], tools: Sequence[Message], text: str, index: int
) -> ToolCall | Malformed:
    """Call number `index` in the turn `text`, with arguments as `written`: pairs of a name and a text.

    Arguments that the schema types as strings stay unchanged. Other values are read as JSON; a value that is not JSON
    stays a string, which the tool refuses. Without a schema, a value is read as JSON if possible.
    """
    if problem := name_problem(name):
        return problem
    schemas = _schemas(name, tools)
    try:
        arguments = {key: orjson.Fragment(_as_json(value, schemas.get(key))) for key, value in written}
        raw_arguments = orjson.dumps(arguments).decode()
    except TypeError as error:  # half of a surrogate pair
        return Malformed(f"the arguments of {name!r} cannot be JSON: {error}")
    return parse_arguments(name, raw_arguments, call_id(text, index))


def _as_json(value: str, schema: Any) -> str | bytes:
    """The JSON value that the model meant by a text."""
    types = _types(schema)
    if "string" in types and not (value == "null" and "null" in types):
        return orjson.dumps(value)
    if value in PYTHON and types:
        return PYTHON[value]
    try:
        exact_json.loads(value)
    except ValueError:
        return orjson.dumps(value)
    return value.strip()


def _types(schema: Any) -> set[str]:
    """The JSON types that a schema names, including in its alternatives; `string` if it only lists values with strings
    among them. May be empty."""
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
    """The schemas of a tool's parameters; empty for an unknown tool."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            return (function.get("parameters") or {}).get("properties") or {}
    return {}
