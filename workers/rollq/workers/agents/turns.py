"""The model's parsed turns, each with thoughts, content and calls, and the messages that keep them in a conversation.

Chat templates read the same turn from different fields: the whole text as content, or thoughts and calls separately,
with arguments as a mapping or as JSON. `forms` returns all of these forms. The conversation keeps the first form that
reproduces the model's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import orjson

from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import ID_LENGTH, Malformed, ToolCall
from rollq.workers.engines.protocol import Tokenizer

PROBE = "probe_of_the_template"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    `text` is the whole turn with special tokens, except the token that ended it. `reasoning` holds the thoughts, None
    for a turn without thoughts. `content` is the text outside the thoughts and the `calls`. `lead` is the text before
    the calls, for families whose templates put thoughts into the content.
    """

    text: str
    content: str
    reasoning: str | None = None
    calls: tuple[ToolCall | Malformed, ...] = ()
    lead: str = ""

    @property
    def well_formed(self) -> tuple[ToolCall, ...]:
        """The calls that could be parsed."""
        return tuple(call for call in self.calls if isinstance(call, ToolCall))


class ChatFormat(Protocol):
    """How a model family writes turns."""

    @property
    def verbatim(self) -> bool:
        """Whether conversations keep the text of turns, and environments and judges see all of that text.

        Otherwise they get the parts: thoughts, content and calls.
        """

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise `ConfigError` if turns of this tokenizer cannot be parsed."""

    async def parse(
        self, tokenizer: Tokenizer, text: str, ids: list[int], tools: Sequence[Message] | None, prompt: str
    ) -> Turn:
        """The turn that continues `prompt`, with this text and these token ids, except the token that ended it.

        The model was offered these `tools`. If `tools` is empty, nothing is a call, and all text outside the thoughts
        is content. None means unknown: the prompt may describe tools in words.

        Accepts any text: a turn that cannot be parsed has a malformed call.
        """


def verbatim_message(turn: Turn) -> Message:
    """The turn as a message with all of its text as content."""
    return {"role": "assistant", "content": turn.text}


def forms(turn: Turn, tokenizer: Tokenizer) -> tuple[Message, ...]:
    """Alternative messages for the turn, the preferred message first: its parts, with calls' arguments as a mapping,
    then as JSON; its parts with its lead as content; its whole text; and its parts without content, for templates that
    accept either content or thoughts.

    If a call is malformed or the template ignores calls, the parts would hide what the model did, so the form is the
    text. Only templates that refuse the text of a malformed call, as GPT-OSS's does after thoughts, get the parts
    without calls.
    """
    if len(turn.well_formed) < len(turn.calls):
        return verbatim_message(turn), _parts(replace(turn, calls=()), [])
    parts = _parts(turn, [call.arguments for call in turn.well_formed])
    if not turn.calls:
        return parts, verbatim_message(turn)
    if not shows_calls(tokenizer):
        return (verbatim_message(turn),)
    json = [call.raw_arguments for call in turn.well_formed]
    lead = [_parts(replace(turn, content=turn.lead, reasoning=None), json)] if turn.lead else []
    return parts, _parts(turn, json), *lead, verbatim_message(turn), {**parts, "content": ""}


def _parts(turn: Turn, arguments: Sequence[Any]) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content}
    if turn.reasoning is not None:
        message |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), turn.reasoning)  # templates differ
    if turn.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": value}}
            for call, value in zip(turn.well_formed, arguments, strict=True)
        ]
    return message


def answer(turn: Turn, call: ToolCall | Malformed, text: str, *, verbatim: bool) -> Message:
    """The message that answers one call of a turn.

    Templates refuse the role `tool` after a turn without calls, so if no call is well-formed, the role is `user`. With
    `verbatim`, it is always `tool`.
    """
    name = call.name if isinstance(call, ToolCall) else ""
    if verbatim:
        return {"role": "tool", "name": name, "content": text}
    if not turn.well_formed:
        return {"role": "user", "content": text}
    answered = call if isinstance(call, ToolCall) else turn.well_formed[-1]
    return {"role": "tool", "name": name, "tool_call_id": answered.id, "content": text}


def shows_calls(tokenizer: Tokenizer) -> bool:
    """Whether the chat template renders the field `tool_calls` of an assistant's message."""
    turn = Turn("", "", calls=(ToolCall(PROBE, {PROBE: 1}, "0" * ID_LENGTH, orjson.dumps({PROBE: 1}).decode()),))
    for arguments in (turn.well_formed[0].arguments, turn.well_formed[0].raw_arguments):
        messages = [{"role": "user", "content": "-"}, _parts(turn, [arguments])]
        try:
            return PROBE in tokenizer.render([*messages, answer(turn, turn.calls[0], "-", verbatim=False)])
        except Exception:  # noqa: BLE001 - templates raise what they like
            continue
    return False
