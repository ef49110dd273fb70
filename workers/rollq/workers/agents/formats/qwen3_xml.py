"""Turns as Qwen3-Coder, Qwen3.5 and later models, and Nemotron 3 write them. Pure.

6*7 needs the calculator.
</think>

<tool_call>
<function=calculator>
<parameter=expression>
6*7
</parameter>
</function>
</tool_call>
"""

import re
from collections.abc import Sequence
from typing import Final

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.blocks import CALL_START, NOT_CLOSED, cut
from rollq.workers.agents.formats.thoughts import split_thoughts
from rollq.workers.agents.formats.typed_arguments import parsed_call
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn

CALL: Final = re.compile(
    r"(?:<tool_call>\s*)?<function=([^<>\n]*)>(.*?)(?:(</function>)(?:\s*</tool_call>)?|</tool_call>|\Z)"
    r"|<tool_call>.*?(?:(</tool_call>)|\Z)",
    re.S,
)
"""A call in either form. These models sometimes omit `<tool_call>`."""
PARAMETER: Final = re.compile(r"\s*<parameter=([^<>\n]*)>\n?(?>(.*?)\n?</parameter>)", re.S)


def parse_qwen3_xml(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `prompt` with `text`."""
    thoughts, visible = split_thoughts(text, prompt, CALL_START)
    content, matches = cut(CALL, visible)
    return Turn(text, content, thoughts, tuple(_call(match, tools, text, index) for index, match in enumerate(matches)))


def _call(match: re.Match[str], tools: Sequence[Message], text: str, index: int) -> ToolCall | Malformed:
    name, body, function_end, call_end = match.groups()
    if call_end:
        return Malformed("a tool call holds <function=NAME> and </function>")
    if name is None:
        return NOT_CLOSED
    name = name.strip()
    if not function_end:
        return Malformed(f"the call of {name!r} has no </function>")
    form = "<parameter=NAME>, a line with its value, and </parameter>"
    return parsed_call(name, body, PARAMETER, form, tools, text, index)
