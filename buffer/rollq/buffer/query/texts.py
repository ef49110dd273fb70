"""A group's texts that queries can search."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rollq.buffer.common.mappings import without
from rollq.buffer.values.rollouts import Sample

_NOT_SAID = ("role", "type", "id", "tool_call_id")


@dataclass(frozen=True, slots=True)
class GroupTexts:
    """A group's searched texts: its whole prompt, and the texts of its samples and their conversations."""

    prompt: str
    text: str


def texts_of(content: Any, samples: Iterable[Sample]) -> GroupTexts:
    """The texts of a group with this `Prompt.content`.

    All fields of a message except roles, types and ids are searched, so tool calls are found too.
    """
    written = [text for sample in samples for text in (sample.text, *_said(sample.extra.get("messages")))]
    return GroupTexts("\n".join(_said(content)), "\n".join(written))


def _said(value: Any) -> list[str]:
    """All texts in messages, without roles and ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(without(value, _NOT_SAID).values())
    return [text for part in value for text in _said(part)] if isinstance(value, list | tuple) else []
