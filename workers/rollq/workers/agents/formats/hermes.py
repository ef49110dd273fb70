"""Turns as Hermes, Qwen2.5 and Qwen3 write them. Pure.

<think>
6*7 needs the calculator.
</think>

<tool_call>
{"name": "calculator", "arguments": {"expression": "6*7"}}
</tool_call>
"""

from collections.abc import Sequence

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.blocks import CALL, CALL_START, NOT_CLOSED, cut
from rollq.workers.agents.formats.json_calls import json_call
from rollq.workers.agents.formats.thoughts import split_thoughts
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn


def parse_hermes(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `prompt` with `text`."""
    thoughts, visible = split_thoughts(text, prompt, CALL_START)
    content, calls = hermes_calls(visible, text)
    return Turn(text, content, thoughts, calls)


def hermes_calls(visible: str, text: str) -> tuple[str, tuple[ToolCall | Malformed, ...]]:
    """The calls in a turn, and the text around them. `visible` is the part of the turn's `text` after its thoughts."""
    content, matches = cut(CALL, visible)
    return content, tuple(
        json_call(match[1], "arguments", text, index) if match[2] else NOT_CLOSED for index, match in enumerate(matches)
    )
