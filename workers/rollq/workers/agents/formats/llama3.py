"""Turns as Llama 3.1, 3.2 and 3.3 write them. Pure.

{"name": "calculator", "parameters": {"expression": "6*7"}}

Several calls are separated by semicolons. `<|python_tag|>` may precede them. A call to a tool that Llama knows from its
training is `<|python_tag|>brave_search.call(query="6*7")`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from rollq.buffer.common import exact_json
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.blocks import around
from rollq.workers.agents.formats.json_calls import json_call, json_end, named_call
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn

TAG: Final = "<|python_tag|>"
OBJECT: Final = re.compile(r'\{\s*"(?:name|type|parameters|arguments)"\s*:')
KNOWN_TOOL: Final = re.compile(r'\s*(\w+)\.call\(((?:\w+="[^"]*"(?:,\s*)?)*+)\)\s*\Z')
ARGUMENT: Final = re.compile(r'(\w+)="([^"]*)"')
SEPARATORS: Final = "; \n\t"


def parse_llama3(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `prompt` with `text`. JSON that is not a call is content."""
    before, tag, code = text.partition(TAG)
    content, calls = _calls(before + code, text, len(before) if tag else 0)
    if tag and not calls:
        return Turn(text, before, calls=(_known_tool(code, text),))
    return Turn(text, content, calls=tuple(calls))


def _calls(visible: str, text: str, first: int) -> tuple[str, list[ToolCall | Malformed]]:
    """The text around the calls, and the calls. JSON at position `first` was meant as a call, valid or not."""
    first = len(visible) - len(visible[first:].lstrip())
    calls: list[ToolCall | Malformed] = []
    pieces, piece_start, place = [], 0, 0
    while match := OBJECT.search(visible, place):
        start, end = match.start(), json_end(visible, match.start())
        call = _call(visible[start:end], text, len(calls), complete=end is not None)
        place = len(visible) if end is None else end
        if isinstance(call, ToolCall) or (start == first and call is not None):
            calls.append(call)
            pieces.append(visible[piece_start:start])
            piece_start = place
    return around([*pieces, visible[piece_start:]], SEPARATORS), calls


def _call(raw: str, text: str, index: int, *, complete: bool) -> ToolCall | Malformed | None:
    """The call that the JSON `raw` describes; None if it describes no call."""
    if not complete:
        return Malformed("the JSON of a tool call is not complete")
    try:
        written: Mapping[str, Any] = exact_json.loads(raw)
    except ValueError as error:
        return Malformed(f"a tool call is one JSON object; this is not: {error}")
    for key in ("parameters", "arguments"):
        if key in written and "name" in written:
            return json_call(raw, key, text, index)
    return None


def _known_tool(code: str, text: str) -> ToolCall | Malformed:
    call = KNOWN_TOOL.match(code)
    if call is None:
        return Malformed(f'{TAG} is followed by {{"name": NAME, "parameters": {{...}}}}')
    arguments = orjson.dumps(dict(ARGUMENT.findall(call[2]))).decode()
    return named_call(call[1], arguments, text, 0)
