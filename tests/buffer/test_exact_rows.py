"""JSON that keeps the digits of its numbers, as rows do."""

import doctest
from decimal import Context, Decimal
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rollq.buffer.common import exact_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def test_the_examples_of_the_docstrings_hold() -> None:
    assert doctest.testmod(exact_json).failed == 0


@given(VALUES)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert exact_json.loads_as_written(exact_json.dumps(value)) == value


@example("10000001E-330")
@given(st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][-+]?[0-9]{1,3})?", fullmatch=True))
def test_any_number_keeps_its_value(written: str) -> None:
    (value,) = exact_json.loads_as_written(f"[{written}]".encode())
    if isinstance(value, float):
        digits = len(Decimal(written).normalize(Context(prec=100)).as_tuple().digits)
        assert Decimal(f"{value:.{digits - 1}e}") == Decimal(written)
    else:
        assert Decimal(value) == Decimal(written)


@pytest.mark.parametrize("text", [b"[1", b"[NaN1234567890123456789]", b"\xff 12345678901234567890", b"[" * 20_000])
def test_what_is_not_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        exact_json.loads_as_written(text + b"12345678901234567890")


def test_what_json_has_no_form_for_is_refused() -> None:
    with pytest.raises(TypeError):
        exact_json.dumps({"a": object(), "b": 1 << 70})
    assert orjson.loads(exact_json.dumps({"a": [1 << 64]})) == {"a": [float(1 << 64)]}


def test_a_view_of_bytes_is_read_like_bytes() -> None:
    text = b'{"n": 147573952589676412928}'
    assert exact_json.loads(memoryview(text)) == exact_json.loads_as_written(memoryview(text)) == {"n": 1 << 67}


@pytest.mark.parametrize("number", ["1", "12345678901234567890", "1e400"])
def test_half_of_a_surrogate_pair_is_refused_beside_any_number(number: str) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        exact_json.loads_as_written(f'{{"prompt": "\\ud800", "answer": {number}}}')
