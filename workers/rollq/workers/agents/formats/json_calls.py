"""Calls that are written as JSON. Pure."""

import re
from typing import Any, Final

import orjson

from rollq.workers.agents.tool_calls import ID_LENGTH, Malformed, ToolCall, call_id, parse_arguments

PART: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[{}\[\]]', re.S)
"""A string, whose end is missing if the text was cut off in it, or a bracket."""


def json_end(text: str, start: int) -> int | None:
    """Where the JSON object or list that begins at `start` ends; None if it does not. It may be invalid within."""
    depth = 0
    for part in PART.finditer(text, start):
        match part[0]:
            case "{" | "[":
                depth += 1
            case "}" | "]":
                depth -= 1
                if depth <= 0:
                    return part.end()
            case _ if not part[1]:
                return None
    return None


def json_call(written: Any, key: str, text: str, index: int) -> ToolCall | Malformed:
    """Call number `index` of the turn `text`, written as an object with `name`, and its arguments under `key`."""
    if not isinstance(written, dict) or not isinstance(written.get("name"), str):
        return Malformed(f'a tool call is a JSON object with "name" (a string) and "{key}" (an object)')
    name, arguments = written["name"], written.get(key, {})
    if not isinstance(arguments, dict):
        return Malformed(f'"{key}" of {name!r} must be a JSON object')
    given = written.get("id")
    id = given if isinstance(given, str) and len(given) == ID_LENGTH else call_id(text, index)
    return ToolCall(name, arguments, id, orjson.dumps(arguments).decode())


def named_call(name: str, raw_arguments: str, text: str, index: int) -> ToolCall | Malformed:
    """Call number `index` of the turn `text`, written as a name and arguments in JSON."""
    if not name:
        return Malformed("a tool call without the name of the tool")
    return parse_arguments(name, raw_arguments, call_id(text, index))
