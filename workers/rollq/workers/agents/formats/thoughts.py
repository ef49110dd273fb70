"""Thoughts at the start of a turn. Pure."""

from typing import Final

from rollq.workers.agents.turns import Turn

THINK: Final = ("<think>", "</think>")
LAST_CHARACTERS: Final = 64
"""Of a prompt: enough for the mark that opens thoughts, and white space."""


def split_thoughts(text: str, prompt: str, call: str, marks: tuple[str, str] = THINK) -> tuple[str | None, str]:
    """The thoughts of a turn, None without any, and the rest.

    They are open from the start if `prompt`, the text that the model continued, ends with the mark that opens them, or
    if the turn begins with it. They end with the first mark that closes them; if there is none, the turn was cut off
    within its thoughts. A mark that closes thoughts which were never opened ends them too, unless there was a `call`
    before it: then it is part of an argument. With "", a turn has no calls.
    """
    start, end = marks
    opened = prompt[-LAST_CHARACTERS:].rstrip().endswith(start) or text.lstrip().startswith(start)
    thoughts, closed, rest = text.partition(end)
    if not opened and (not closed or (call and call in thoughts)):
        return None, text
    written = thoughts.lstrip()
    return (written.removeprefix(start) if written.startswith(start) else thoughts), rest


def parse_thoughts(text: str, prompt: str = "", marks: tuple[str, str] = THINK) -> Turn:
    """The turn that continues `prompt` with `text`, of a model that has no tools: all but its thoughts is content."""
    thoughts, visible = split_thoughts(text, prompt, "", marks)
    return Turn(text, visible, thoughts)
