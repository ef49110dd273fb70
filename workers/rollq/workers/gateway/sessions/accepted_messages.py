"""Puts a call's messages into the order and the form that chat templates take. Pure.

Clients send tool results in the order in which the tools end, but templates without ids match results by position. Some
templates refuse system messages after the first message; others omit or move them.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import Final

from rollq.workers.agents.conversation import Message
from rollq.workers.engines.protocol import Tokenizer

BEFORE: Final = "words_before"
WORDS: Final = "words_of_the_system"


def accepted(messages: Sequence[Message], tokenizer: Tokenizer) -> tuple[Message, ...]:
    """The messages, with results in the calls' order, and system messages where the chat template takes them."""
    ordered = ordered_results(messages)
    keeps = keeps_system_messages(tokenizer)  # type: ignore[arg-type]  # hashed by identity
    return tuple(ordered) if keeps else fold_system_messages(ordered)


def ordered_results(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages. Results that follow a message with tool calls are in the calls' order."""
    ordered: list[Message] = []
    for is_result, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_result and ordered:
            calls = ordered[-1].get("tool_calls") or ()
            places = {call["id"]: place for place, call in enumerate(calls)}
            ordered += sorted(run, key=lambda result: places.get(result.get("tool_call_id", ""), len(calls)))
        else:
            ordered += run
    return ordered


@lru_cache(maxsize=16)
def keeps_system_messages(tokenizer: Tokenizer) -> bool:
    """Whether the chat template renders a mid-conversation system message at its position."""
    messages = [
        {"role": "user", "content": BEFORE},
        {"role": "assistant", "content": BEFORE},
        {"role": "system", "content": WORDS},
        {"role": "user", "content": "-"},
    ]
    try:
        rendered = tokenizer.render(messages)
    except Exception:  # noqa: BLE001 - templates raise what they like
        return False
    return rendered.rfind(BEFORE) < rendered.find(WORDS)


def fold_system_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages. Each system message after the first message becomes user text, at the start of the next user
    message if there is one."""
    folded: list[Message] = []
    waiting: list[str] = []
    for place, message in enumerate(messages):
        content = message.get("content") or ""
        if message["role"] == "system" and place:
            waiting.append(content)
        elif waiting and message["role"] == "user":
            folded.append({**message, "content": "\n\n".join([*waiting, content])})
            waiting = []
        else:
            folded += _as_user(waiting)
            folded.append(message)
            waiting = []
    return (*folded, *_as_user(waiting))


def _as_user(texts: Sequence[str]) -> list[Message]:
    return [{"role": "user", "content": "\n\n".join(texts)}] if texts else []
