"""Real numbers as user-written code returns them. Pure."""

import math
from typing import Any


def finite(value: Any, needed: str = "a number") -> float:
    """A real number, as Python, numpy or torch have it. Raises `ValueError` for anything else, such as a text or a
    boolean, and for one that is not finite."""
    if not is_real(value):
        raise ValueError(f"returned {value!r:.80}; expected {needed}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number!r}; expected a finite number")
    return number


def is_real(value: Any) -> bool:
    """Whether a value is one real number: `int`, `float`, `Decimal`, numpy's, or an array or tensor of one."""
    if isinstance(value, bool | str | bytes | bytearray) or not hasattr(value, "__float__"):
        return False
    kind = str(getattr(value, "dtype", "float"))
    if any(other in kind for other in ("bool", "complex", "<U", "|S")):
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return True
