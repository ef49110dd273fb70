"""Turns in OpenAI's harmony format, as GPT-OSS writes them. Pure.

<|channel|>analysis<|message|>6*7 needs the calculator.<|end|><|start|>assistant<|channel|>commentary to=functions.
calculator <|constrain|>json<|message|>{"expression": "6*7"}<|call|>

A turn is one or more messages. The channel `analysis` is for thoughts, `final` for the answer, and `commentary` for
calls and remarks to the user. A recipient (`to=`), in either position in the header, makes a message a call.
"""

import re
from collections.abc import Sequence
from typing import Final

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import Malformed, ToolCall, call_id, parse_arguments
from rollq.workers.agents.turns import Turn

START: Final = "<|start|>"
CHANNEL: Final = "<|channel|>"
BODY: Final = "<|message|>"
END: Final = re.compile(r"<\|(?:end|call|return)\|>")
RECIPIENT: Final = re.compile(r"to=([^\s<]+)")
NAMESPACE: Final = "functions."


def parse_harmony(text: str, tools: Sequence[Message] = (), prompt: str = "") -> Turn:
    """The turn that continues `<|start|>assistant`, the end of `prompt`, with `text`."""
    thoughts: list[str] = []
    content: list[str] = []
    calls: list[ToolCall | Malformed] = []
    for header, body in _messages(text):
        recipient = RECIPIENT.search(header)
        channel = header.rpartition(CHANNEL)[2].lstrip()
        if recipient is not None:
            name = recipient[1].removeprefix(NAMESPACE)
            calls.append(parse_arguments(name, body, call_id(text, len(calls))))
        elif channel.startswith("analysis"):
            thoughts.append(body)
        elif channel.startswith(("final", "commentary")) or CHANNEL not in header:
            content.append(body)
    return Turn(text, "\n".join(content), "\n".join(thoughts) if thoughts else None, tuple(calls))


def parse_harmony_thoughts(text: str, prompt: str = "") -> Turn:
    """The turn of a model without tools. A message to a tool is content, unchanged."""
    thoughts: list[str] = []
    content: list[str] = []
    for place, message in enumerate(text.split(START)):
        for header, body in _messages(message if place == 0 else START + message):
            channel = header.rpartition(CHANNEL)[2].lstrip()
            if RECIPIENT.search(header):
                content.append(message.removeprefix("assistant"))
            elif channel.startswith("analysis"):
                thoughts.append(body)
            elif channel.startswith(("final", "commentary")) or CHANNEL not in header:
                content.append(body)
    return Turn(text, "\n".join(content), "\n".join(thoughts) if thoughts else None)


def _messages(text: str) -> list[tuple[str, str]]:
    """The header and body of each message. A message without a header, which is not harmony, gets an empty header.
    Messages with other roles and messages cut off within the header are left out."""
    first, *others = text.split(START)
    messages = []
    for message in (first, *(other.removeprefix("assistant") for other in others if other.startswith("assistant"))):
        header, separator, body = message.partition(BODY)
        if separator:
            messages.append((header, END.split(body, maxsplit=1)[0]))
        elif CHANNEL not in header and not RECIPIENT.match(header.lstrip()) and header.strip():
            messages.append(("", header))
    return messages
