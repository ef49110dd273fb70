"""Errors of user code, in one line."""

import json
from collections.abc import Callable

import pytest

from rollq.workers.user_code.errors import MAX_REASON, reason_of, what_happened


def looks_up() -> None:
    raise LookupError("no such column")


def in_a_package() -> None:
    json.loads("{")


def caused() -> None:
    try:
        looks_up()
    except LookupError as error:
        raise RuntimeError("tool failed") from error


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError


def wordless() -> None:
    raise Wordless


def long() -> None:
    raise ValueError("x" * 3_000_000)


def surrogate() -> None:
    raise ValueError("\ud800")


def caught(function: Callable[[], None]) -> Exception:
    with pytest.raises(Exception) as error:
        function()
    return error.value


def test_a_reason_ends_with_the_last_line_of_user_code() -> None:
    here = "tests/workers/test_errors_in_user_code.py"
    assert reason_of(caught(looks_up)) == f"LookupError: no such column ({here}:12 in looks_up)"
    assert reason_of(caught(in_a_package)).endswith(f"({here}:16 in in_a_package)")
    assert reason_of(caught(caused)) == f"RuntimeError: tool failed ({here}:23 in caused)"


def test_a_reason_is_short_and_can_be_stored() -> None:
    assert len(reason_of(caught(long))) == MAX_REASON
    assert reason_of(caught(wordless)).startswith("Wordless (")
    assert what_happened(caught(surrogate)) == "ValueError: ?"
    assert what_happened(KeyError("a")) == "KeyError: 'a'"
