"""Numbers in texts from outside are read, or are refused; none raises."""

import pytest

from rollq.buffer.common.whole_numbers import MOST_DIGITS, whole_number


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1.0", "1e3", "0x1", " 1", "1_0", "²", "٣", "9" * (MOST_DIGITS + 1), "9" * 5000]
)
def test_other_texts_are_no_numbers(text: str) -> None:
    assert whole_number(text) is None


@pytest.mark.parametrize("text", ["0", "7", "007", "9" * MOST_DIGITS])
def test_decimal_digits_are_a_number(text: str) -> None:
    assert whole_number(text) == int(text)
