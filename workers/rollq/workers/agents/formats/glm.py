"""Turns as GLM-4.5 and later models write them. Pure.

<think>6*7 needs the calculator.</think>
<tool_call>calculator
<arg_key>expression</arg_key>
<arg_value>6*7</arg_value>
</tool_call>

From GLM-4.7 on, turns have no line breaks.
"""

import re
from collections.abc import Sequence
from typing import Final

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.blocks import CALL, CALL_START, NOT_CLOSED, cut
from rollq.workers.agents.formats.thoughts import split_thoughts
from rollq.workers.agents.formats.typed_arguments import parsed_call
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn

ARGUMENT: Final = re.compile(r"\s*<arg_key>(?>(.*?)</arg_key>)\s*<arg_value>(?>(.*?)</arg_value>)", re.S)


def parse_glm(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `prompt` with `text`."""
    thoughts, visible = split_thoughts(text, prompt, CALL_START)
    content, matches = cut(CALL, visible)
    calls = (_call(match[1], tools, text, index) if match[2] else NOT_CLOSED for index, match in enumerate(matches))
    return Turn(text, content, thoughts, tuple(calls))


def _call(body: str, tools: Sequence[Message], text: str, index: int) -> ToolCall | Malformed:
    name, _, _ = body.partition("<arg_key>")
    form = "<arg_key>NAME</arg_key>, then <arg_value>VALUE</arg_value>"
    return parsed_call(name.strip(), body[len(name) :], ARGUMENT, form, tools, text, index)
