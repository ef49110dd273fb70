"""Turns as DeepSeek V3, R1 and V3.1 write them. Pure.

6*7 needs the calculator.</think>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator
```json
{"expression": "6*7"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

From V3.1 on, a call is `calculator<｜tool▁sep｜>{"expression": "6*7"}` between its two marks.
"""

import re
from collections.abc import Sequence
from typing import Final

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.formats.json_calls import named_call
from rollq.workers.agents.formats.thoughts import split_thoughts
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn

CALLS_START: Final = "<｜tool▁calls▁begin｜>"
CALLS_END: Final = "<｜tool▁calls▁end｜>"
SEPARATOR: Final = "<｜tool▁sep｜>"
END: Final = "<｜tool▁call▁end｜>"
CALL: Final = re.compile(rf"<｜tool▁call▁begin｜>(.*?)({END}|\Z)", re.S)
FENCE: Final = "```"


def parse_deepseek(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `prompt` with `text`."""
    thoughts, visible = split_thoughts(text, prompt, CALLS_START)
    before, start, rest = visible.partition(CALLS_START)
    inside, _, after = rest.partition(CALLS_END)
    calls = [_call(match, text, index) for index, match in enumerate(CALL.finditer(inside))]
    if start and not calls:
        calls = [Malformed(f"there is no <｜tool▁call▁begin｜> after {CALLS_START}")]
    return Turn(text, before + after, thoughts, tuple(calls))


def _call(match: re.Match[str], text: str, index: int) -> ToolCall | Malformed:
    if not match[2]:
        return Malformed(f"a tool call without {END}")
    head, separator, body = match[1].partition(SEPARATOR)
    if not separator:
        return Malformed(f"a tool call without {SEPARATOR}")
    if head.strip() != "function" or FENCE not in body:
        return named_call(head.strip(), body.strip(), text, index)
    name, _, fenced = body.strip().partition("\n")
    return named_call(name.strip(), fenced.strip().strip(FENCE).removeprefix("json").strip(), text, index)
