"""Thoughts at the start of a turn. Pure."""

from typing import Final

from rollq.workers.agents.turns import Turn

THINK: Final = ("<think>", "</think>")
LAST_CHARACTERS: Final = 64
"""How many characters at a prompt's end are searched for the opening mark. White space may follow the mark."""


def split_thoughts(text: str, prompt: str, call: str, marks: tuple[str, str] = THINK) -> tuple[str | None, str]:
    """A turn's thoughts, None for a turn without thoughts, and the rest of the turn.

    Thoughts start if `prompt`, the text that the model continued, ends with the opening mark, or if the turn begins
    with it. They end at the first closing mark. Without a closing mark, the turn was cut off within its thoughts. A
    closing mark without an opening mark also ends thoughts, unless a `call` precedes the mark: then the mark is part of
    an argument. If `call` is "", the turn has no calls.
    """
    start, end = marks
    opened = prompt[-LAST_CHARACTERS:].rstrip().endswith(start) or text.lstrip().startswith(start)
    thoughts, closed, rest = text.partition(end)
    if not opened and (not closed or (call and call in thoughts)):
        return None, text
    written = thoughts.lstrip()
    return (written.removeprefix(start) if written.startswith(start) else thoughts), rest


def parse_thoughts(text: str, prompt: str = "", marks: tuple[str, str] = THINK) -> Turn:
    """The turn of a model without tools that continues `prompt` with `text`: all text after the thoughts is content."""
    thoughts, visible = split_thoughts(text, prompt, "", marks)
    return Turn(text, visible, thoughts)
