"""Calls written as JSON. Pure."""

import json
import re
from typing import Final

from rollq.buffer.common import exact_json
from rollq.workers.agents.tool_calls import ID_LENGTH, Malformed, ToolCall, call_id, parse_arguments

PART: Final = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)|[{}\[\]]', re.S)
"""A bracket or a string. A string that was cut off has no closing quote."""
BLANK: Final = re.compile(r"[ \t\r\n]*+")
NOT_IN_NAMES: Final = re.compile(r"""[\n"'(){}\[\]<>=]""")
"""Characters that occur in calls of other forms, which would look like tool names without arguments."""
NO_NAME: Final = Malformed("a tool call without the name of the tool")
_DECODER: Final = json.JSONDecoder()


def json_end(text: str, start: int) -> int | None:
    """The end of the JSON object or list that begins at `start`; None if it was cut off. The content is not checked."""
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


def json_call(raw: str, key: str, text: str, index: int) -> ToolCall | Malformed:
    """Call number `index` in the turn `text`, written as an object with `name`, and with arguments under `key`."""
    try:
        written = exact_json.loads(raw)
    except ValueError as error:
        return Malformed(f"a tool call is one JSON object; this is not: {error}")
    if not isinstance(written, dict) or not isinstance(written.get("name"), str):
        return Malformed(f'a tool call is a JSON object with "name" (a string) and "{key}" (an object)')
    name, given = written["name"], written.get("id")
    if not name:
        return NO_NAME
    id = given if isinstance(given, str) and len(given) == ID_LENGTH else call_id(text, index)
    if key in written:
        return parse_arguments(name, members(raw)[key], id, key)
    if others := written.keys() - {"name", "id", "type"}:
        return Malformed(f'"{key}" of {name!r} are missing; there is {", ".join(map(repr, sorted(others)))}')
    return ToolCall(name, {}, id, "{}")


def named_call(name: str, raw_arguments: str, text: str, index: int) -> ToolCall | Malformed:
    """Call number `index` in the turn `text`, written as a name and arguments in JSON."""
    return name_problem(name) or parse_arguments(name, raw_arguments, call_id(text, index))


def name_problem(name: str) -> Malformed | None:
    """The problem with a tool name that is written without JSON; None if there is none."""
    if not name:
        return NO_NAME
    return Malformed(f"{name[:80]!r} is not the name of a tool") if NOT_IN_NAMES.search(name) else None


def members(raw: str) -> dict[str, str]:
    """The members of the JSON object `raw`: names, and values still in JSON."""
    members_by_name = {}
    place = _blank_end(raw, raw.index("{") + 1)
    while raw[place] != "}":
        name, end = _DECODER.raw_decode(raw, place)
        start = _blank_end(raw, _blank_end(raw, end) + 1)
        end = _value_end(raw, start)
        members_by_name[name] = raw[start:end]
        place = _next(raw, end)
    return members_by_name


def elements(raw: str) -> list[str]:
    """The elements of the JSON list `raw`, still in JSON."""
    raw_elements = []
    place = _blank_end(raw, raw.index("[") + 1)
    while raw[place] != "]":
        end = _value_end(raw, place)
        raw_elements.append(raw[place:end])
        place = _next(raw, end)
    return raw_elements


def _value_end(raw: str, start: int) -> int:
    """The end of the JSON value that begins at `start`."""
    if raw[start] in "{[":
        end = json_end(raw, start)
        assert end is not None
        return end
    _, end = _DECODER.raw_decode(raw, start)
    return end


def _next(raw: str, end: int) -> int:
    """The start of the next value in a list or object, or the end of the list or object."""
    place = _blank_end(raw, end)
    return _blank_end(raw, place + 1) if raw[place] == "," else place


def _blank_end(raw: str, place: int) -> int:
    blank = BLANK.match(raw, place)
    assert blank is not None
    return blank.end()
