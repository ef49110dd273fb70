"""System messages after the first message, which some chat templates refuse, and others leave out or move. Pure."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from rollq.workers.agents.conversation import Message
from rollq.workers.engines.protocol import Tokenizer

BEFORE: Final = "words_before"
WORDS: Final = "words_of_the_system"


@lru_cache(maxsize=16)
def keeps_system_messages(tokenizer: Tokenizer) -> bool:
    """Whether the chat template renders a system message where it is, in the middle of a conversation."""
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
    """The messages, with each system message but the first message as words of the user: at the start of the user's
    message that follows, if one does."""
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
