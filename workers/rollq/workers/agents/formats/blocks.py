"""Calls in a turn, and the text around them. Pure."""

import re
from collections.abc import Sequence
from typing import Final

from rollq.workers.agents.tool_calls import Malformed

CALL_START: Final = "<tool_call>"
CALL: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.S)
"""A call as several model families write it. A call that was cut off has no end tag."""
NOT_CLOSED: Final = Malformed("a tool call without </tool_call>")


def cut(calls: re.Pattern[str], visible: str) -> tuple[str, list[re.Match[str]]]:
    """The text around the calls, and the calls."""
    matches = list(calls.finditer(visible))
    starts = [0, *(match.end() for match in matches)]
    ends = [*(match.start() for match in matches), len(visible)]
    return around([visible[start:end] for start, end in zip(starts, ends, strict=True)]), matches


def around(pieces: Sequence[str], separators: str | None = None) -> str:
    """Join the pieces of text before, between and after calls.

    White space next to a call, or `separators`, belongs to the call. A turn without calls stays unchanged.
    """
    if len(pieces) == 1:
        return pieces[0]
    return "\n".join(filter(None, (piece.strip(separators) for piece in pieces)))
