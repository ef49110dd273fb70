"""Turns as Mistral's models write them. Pure.

[THINK]6*7 needs the calculator.[/THINK][TOOL_CALLS]calculator[ARGS]{"expression": "6*7"}

Models with an older tokenizer (before version 11) write all calls as one list:

[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "6*7"}}]
"""

import re
from collections.abc import Sequence
from typing import Final

from rollq.buffer.common import exact_json
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.json_calls import elements, json_call, json_end, named_call
from rollq.workers.agents.formats.thoughts import THINK, parse_thoughts, split_thoughts
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn

CALLS: Final = "[TOOL_CALLS]"
BRACKETS: Final = ("[THINK]", "[/THINK]")
HEAD: Final = re.compile(
    r"\s*+([^\s\[\]{}]*+)\s*+(?:\[CALL_ID\]\s*+[^\s\[\]{}]*+\s*+)?+(?:\[ARGS\]\s*+)?+(?=\{|\[(?!TOOL_CALLS\]))"
)
"""The text before the JSON: the name of the tool, or nothing before a list."""


def parse_mistral(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `prompt` with `text`."""
    thoughts, visible = split_thoughts(text, prompt, CALLS, _marks(text))
    calls: list[ToolCall | Malformed] = []
    place = visible.find(CALLS)
    content = [visible[:place] if place >= 0 else visible]
    lead = "" if thoughts is None else text.removesuffix(visible) + content[0]
    while place >= 0:
        more, end = _calls(visible, place + len(CALLS), text, len(calls))
        calls += more
        place = visible.find(CALLS, end)
        content.append(visible[end : place if place >= 0 else len(visible)])
    return Turn(text, "".join(content), thoughts, tuple(calls), lead)


def parse_mistral_thoughts(text: str, prompt: str = "") -> Turn:
    """The turn of a model without tools (see `parse_thoughts`)."""
    return parse_thoughts(text, prompt, _marks(text))


def _marks(text: str) -> tuple[str, str]:
    return THINK if text.lstrip().startswith(THINK[0]) else BRACKETS  # Magistral of June 2025


def _calls(visible: str, place: int, text: str, index: int) -> tuple[Sequence[ToolCall | Malformed], int]:
    """The calls after a mark, numbered from `index`, and the position where they end."""
    head = HEAD.match(visible, place)
    if head is None:
        return [Malformed(f"{CALLS} is followed by the name of a tool, [ARGS] and a JSON object")], place
    end = json_end(visible, head.end())
    if end is None:
        return [Malformed(f"the JSON after {CALLS} is not complete")], len(visible)
    raw = visible[head.end() : end]
    return [named_call(head[1], raw, text, index)] if head[1] else _listed(raw, text, index), end


def _listed(raw: str, text: str, index: int) -> list[ToolCall | Malformed]:
    """The calls in a JSON list, numbered from `index`."""
    try:
        written = exact_json.loads(raw)
    except ValueError as error:
        return [Malformed(f"{CALLS} is followed by a JSON list of calls; this is not: {error}")]
    listed = elements(raw) if isinstance(written, list) and written else [raw]
    return [json_call(call, "arguments", text, number) for number, call in enumerate(listed, index)]
