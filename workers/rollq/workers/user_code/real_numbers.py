"""Real numbers from user-written code. Pure."""

from typing import Any

from rollq.buffer.wire.validation import MOST_REWARD


def finite(value: Any, needed: str = "a number") -> float:
    """Convert a real number from Python, numpy or torch, finite as a float32. Raises `ValueError` for other numbers and
    other types, such as strings and booleans."""
    if not is_real(value):
        raise ValueError(f"returned {value!r:.80}; expected {needed}")
    number = float(value)
    if not abs(number) <= MOST_REWARD:
        raise ValueError(f"returned {number!r}; expected a finite number of 32 bits")
    return number


def is_real(value: Any) -> bool:
    """Whether a value is a single real number: `int`, `float`, `Decimal`, a numpy scalar, or an array or tensor with
    one element."""
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
