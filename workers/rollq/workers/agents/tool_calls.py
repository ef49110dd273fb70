"""Function calls of a model, and those in its text in the form of Hermes and Qwen. Pure.

<tool_call>
{"name": "calculator", "arguments": {"expression": "6 * 7"}}
</tool_call>
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from rollq.buffer.errors import RollqError

CALL: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)
END_OF_THOUGHTS: Final = "</think>"
ID_LENGTH: Final = 9
"""Characters of an id that we give a call; Mistral's templates accept no other length."""


class CallError(RollqError, ValueError):
    """The model called a tool incorrectly. Tools raise it too; its message becomes the answer to the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. `raw_arguments` are its arguments as JSON; `id` identifies it in messages."""

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False)
    raw_arguments: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be parsed. `problem` is for the model to read."""

    problem: str


def parse_calls(text: str) -> list[ToolCall | Malformed]:
    """The calls in one turn of the model, in order. Text before `</think>` is ignored."""
    visible = text.rpartition(END_OF_THOUGHTS)[2]
    return [
        _parse(match[1], call_id(None, text, index)) if match[2] else Malformed("a tool call without </tool_call>")
        for index, match in enumerate(CALL.finditer(visible))
    ]


def call_id(written: str | None, text: str, index: int) -> str:
    """The id of a call: the one that the model wrote in `text`, else one made from the text, the same every time."""
    if written and written in text:
        return written
    return hashlib.sha256(f"{index}:{text}".encode(errors="replace")).hexdigest()[:ID_LENGTH]


def parse_arguments(name: str, raw_arguments: str, id: str) -> ToolCall | Malformed:
    """The call of `name` with arguments in JSON."""
    try:
        arguments = orjson.loads(raw_arguments)
    except ValueError as error:
        return Malformed(f'"arguments" of {name!r} must be a JSON object, this is not: {error}')
    if not isinstance(arguments, dict):
        return Malformed(f'"arguments" of {name!r} must be a JSON object')
    return ToolCall(name, arguments, id, raw_arguments)


def _parse(body: str, id: str) -> ToolCall | Malformed:
    try:
        call = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return Malformed(f"a tool call is one JSON object, this is not: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Malformed('a tool call is a JSON object with "name" (a string) and "arguments" (an object)')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Malformed(f'"arguments" of {call["name"]!r} must be a JSON object')
    return ToolCall(call["name"], arguments, id, orjson.dumps(arguments).decode())
