"""Converts the items in a request to OpenAI's responses to chat messages. Pure.

An answer consists of a thought, a text and calls; any of these may be missing. Successive items in this order form one
assistant message.
"""

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any, Final

from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.calls import CallRefused
from rollq.workers.gateway.protocols import fields
from rollq.workers.gateway.protocols.responses_tools import CUSTOM_INPUT, joined

TEXTS: Final = ("input_text", "output_text", "text", "refusal")
ENCRYPTED: Final = b"rollq:"
TAGGED: Final = re.compile(r"<think>\n(.*)\n</think>", re.S)
"""A thought that pydantic-ai sends back as a message when it does not know that the model thinks."""


class History:
    """Builds the messages for a list of items."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: dict[str, None] = {}
        self._has_result = False
        self._names: dict[str, str] = {}  # of the tools, by the ids of their calls
        self._turn: dict[str, Any] = {}  # the assistant's message that the next item may belong to

    def say(self, role: str, content: str) -> None:
        """Add a message with a role other than the assistant's."""
        self._turn = {}
        self.messages.append({"role": role, "content": content})

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """Add an item."""
        kind = item.get("type", "message")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            thought = _thought(item, where)
            if thought is None:
                self.left_out["input.reasoning"] = None
            else:
                self._open("reasoning_content", "content", "tool_calls")["reasoning_content"] = thought
        elif kind in ("function_call", "custom_tool_call"):
            self._call(item, where)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            self._turn = {}
            id = fields.text(item.get("call_id"), f"{where}.call_id")
            result = fields.content(item.get("output"), f"{where}.output", TEXTS, left_out=self.left_out)
            self.messages.append(fields.tool_result(id, self._names.get(id), result))
            self._has_result = True
        else:
            raise CallRefused(f"{where}.type {fields.label(kind)} is not supported")

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, said = item.get("role"), item.get("content")
        if role == "assistant":
            content = fields.content(said, f"{where}.content", TEXTS, between="")
            thought = TAGGED.fullmatch(content)
            if thought:
                self._open("reasoning_content", "content", "tool_calls")["reasoning_content"] = thought[1]
            else:
                self._open("content", "tool_calls")["content"] = content
        elif role in ("user", "system", "developer"):
            left_out = self.left_out if role == "user" and self._has_result else None
            content = fields.content(said, f"{where}.content", TEXTS, left_out=left_out)
            self.say("user" if role == "user" else "system", content)
        else:
            raise CallRefused(f"{where}.role must be user, assistant, system or developer")

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        id = fields.text(item.get("call_id"), f"{where}.call_id")
        name = fields.nonempty(item.get("name"), f"{where}.name")
        if item.get("namespace") is not None:
            name = joined(fields.text(item["namespace"], f"{where}.namespace"), name)
        if item["type"] == "custom_tool_call":
            written = fields.json_text({CUSTOM_INPUT: fields.text(item.get("input"), f"{where}.input")}, where)
        else:
            written = fields.text(item.get("arguments"), f"{where}.arguments")
        self._names[id] = name
        self._open().setdefault("tool_calls", []).append(fields.tool_call(id, name, written))

    def _open(self, *later: str) -> dict[str, Any]:
        """The assistant's message for an item: the open message, or a new message if the open one has a part in
        `later`. `later` names the parts that follow the item in an answer."""
        if not self._turn or any(self._turn.get(part) for part in later):
            self._turn = {"role": "assistant", "content": ""}
            self.messages.append(self._turn)
        return self._turn


def _thought(item: Mapping[str, Any], where: str) -> str | None:
    """The text of a reasoning item, or None if it has no readable text."""
    encrypted = item.get("encrypted_content")
    if encrypted is not None:
        try:
            decoded = b64decode(fields.text(encrypted, f"{where}.encrypted_content"), validate=True)
            if decoded.startswith(ENCRYPTED):
                return decoded.removeprefix(ENCRYPTED).decode()
        except ValueError:
            pass  # another server's
    for field in ("content", "summary"):
        if fields.items(item.get(field), f"{where}.{field}"):
            return fields.content(item[field], f"{where}.{field}", ("reasoning_text", "summary_text"))
    return None


def encrypted(thought: str) -> str:
    """The encrypted form of a thought, for callers that send back only this form."""
    return b64encode(ENCRYPTED + thought.encode(errors="replace")).decode()
