"""Describes errors from user-written functions in one line: type, message, and the line that raised the error."""

import sysconfig
import traceback
from pathlib import Path
from types import FrameType
from typing import Final

from rollq.buffer.values.failures import SampleFailed

MAX_REASON: Final = 2000
"""The most characters kept from an error."""

_INSTALLED: Final = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def reason_of(error: BaseException) -> str:
    """A short text with an error's type, its message, and the last line of user code in its traceback."""
    place = _place(error)
    return shown(what_happened(error), MAX_REASON - len(place)) + place


def said_by(error: SampleFailed) -> str:
    """The error's message, with the line of user code that raised its cause, if it has a cause."""
    place = _place(error.__cause__) if error.__cause__ else ""
    return shown(str(error), MAX_REASON - len(place)) + place


def what_happened(error: BaseException) -> str:
    """An error's type and message."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python wraps a StopIteration from a coroutine
    try:
        said = str(error)
    except Exception:  # noqa: BLE001 - an exception whose `__str__` raises
        said = ""
    return shown(type(error).__name__ + (f": {said}" if said else ""))


def shown(text: str, limit: int = MAX_REASON) -> str:
    """The beginning of a text, with lone surrogates replaced so that JSON can hold it."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return text.encode("utf-8", "replace").decode()


def is_user_code(frame: FrameType) -> bool:
    """Whether a frame runs user code: neither rollq nor an installed package."""
    module, path = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
    return not str(module).startswith("rollq.") and not path.startswith(("<", *_INSTALLED))


def place_of(frame: FrameType, line: int) -> str:
    """A location in a user's file: `rewards.py:8 in compute`."""
    path = Path(frame.f_code.co_filename)
    shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown_path}:{line} in {frame.f_code.co_name}"


def _place(error: BaseException) -> str:
    while True:
        frames = [(frame, line) for frame, line in traceback.walk_tb(error.__traceback__) if is_user_code(frame)]
        if frames:
            return f" ({place_of(*frames[-1])})"
        if error.__cause__ is None:
            return ""
        error = error.__cause__
