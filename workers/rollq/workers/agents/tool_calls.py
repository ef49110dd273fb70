"""Function calls in a model's text, in the form of Hermes and Qwen. Pure.

<tool_call>
{"name": "calculator", "arguments": {"expression": "6 * 7"}}
</tool_call>
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from rollq.buffer.errors import RollqError

CALL: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)
END_OF_THOUGHTS: Final = "</think>"


class CallError(RollqError, ValueError):
    """The model called a tool incorrectly. Tools raise it too; its message becomes the answer to the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A call that cannot be parsed. `problem` is for the model to read."""

    problem: str


def parse_calls(text: str) -> list[ToolCall | Malformed]:
    """The calls in one turn of the model, in order. Text before `</think>` is ignored."""
    visible = text.rpartition(END_OF_THOUGHTS)[2]
    return [
        _parse(match[1]) if match[2] else Malformed("a tool call without </tool_call>")
        for match in CALL.finditer(visible)
    ]


def _parse(body: str) -> ToolCall | Malformed:
    try:
        call = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return Malformed(f"a tool call is one JSON object, this is not: {error}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Malformed('a tool call is a JSON object with "name" (a string) and "arguments" (an object)')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Malformed(f'"arguments" of {call["name"]!r} must be a JSON object')
    return ToolCall(call["name"], arguments)
