"""Numbers as people write them, against exact arithmetic."""

import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import pytest

from rollq.workers.judging.numbers import (
    Number,
    are_equal,
    decimal_text,
    is_ambiguous,
    last_number,
    number_of,
    only_number,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234.5", "1234.5"), ("12,34,567", "1234567"), ("1'000", "1000"), ("1_000", "1000"), ("1{,}000", "1000"),
        (r"1\,000", "1000"), ("1\u202f000", "1000"), ("-5", "-5"), ("−5", "-5"), ("$-5$", "-5"), ("-$5", "-5"),
        ("x = - 5", "-5"), ("10-5", "5"), ("10 - 5", "5"), ("(a)-5", "5"), ("COVID-19", "19"), ("--5", "5"),
        ("- 5 apples", "5"), ('{"answer": "-5"}', "-5"), ("1e-05", "0.00001"), (r"1.5 \times 10^{-5}", "0.000015"),
        ("10⁻⁵", "0.00001"), ("2^{67}", str(2**67)), ("2**67", str(2**67)), ("6.02x10^23", "6.02e23"), ("3/4", "3/4"),
        (r"\frac{3}{4}", "3/4"), (r"-\dfrac{3}{4}", "-3/4"), ("1 1/2", "3/2"), (r"1\frac12", "3/2"), ("1½", "3/2"),
        ("on 1/2/2026", "2026"), ("25 cm^2", "25"), ("It is 42.", "42"), ("**42**", "42"), (r"\boxed{-5}", "-5"),
        ("５", "5"), ("٣", "3"), ("1.2.3", "3"), ("50%", "50"), ("1\n2\nnone", "2"), ("1e999999999", "1e999999999"),
    ],
)  # fmt: skip
def test_a_number_is_read_as_people_write_it(text: str, value: str) -> None:
    found = last_number(text)
    expected: Number = Fraction(value) if "/" in value else Decimal(value)
    assert found is not None
    assert are_equal(found, expected)


@pytest.mark.parametrize(
    "text", ["", "none", r"\sqrt{2}", r"\frac{\pi}{2}", "2^x", "1/0", "9^99999999", "1e" + "9" * 31]
)
def test_what_is_no_number_or_too_long_equals_nothing(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize("text", ["1,5", "12,34", "1.234,56", "1.234.567", "1 000 000", "#### 0,123", "(3,4)"])
def test_what_people_read_in_several_ways_is_ambiguous(text: str) -> None:
    assert is_ambiguous(text)


@pytest.mark.parametrize("text", ["1,234", "1,234.5", "3, 4", "5", "1e-05", "2 1/4", "12,34,567", "Step 3 42", "none"])
def test_what_people_read_in_one_way_is_not(text: str) -> None:
    assert not is_ambiguous(text)


def test_a_text_is_one_number_or_something_else() -> None:
    assert only_number(" $-1{,}000$ ") == -1000
    assert [only_number(text) for text in ("5%", "5 apples", "5 6", "x", "")] == [None] * 5


def test_a_number_is_shown_without_an_exponent() -> None:
    assert [decimal_text(number) for number in (Decimal("1e-05"), Decimal("1E+3"), Fraction(3, 4))] == [
        "0.00001",
        "1000",
        "3/4",
    ]


def test_only_finite_numbers_are_numbers() -> None:
    assert number_of(0.1) == Decimal("0.1")
    assert number_of(1 << 5000) == Decimal(1 << 5000)
    with pytest.raises(ValueError, match="inf is not a number"):
        number_of(float("inf"))


def grouped(digits: str, mark: str) -> str:
    head = len(digits) % 3 or 3
    return mark.join([digits[:head], *(digits[at : at + 3] for at in range(head, len(digits), 3))])


def fullwidth(text: str) -> str:
    return text.translate({ord(str(digit)): chr(0xFF10 + digit) for digit in range(10)})


def written(random: random.Random) -> tuple[str, Fraction]:
    """A number in one of the ways in which people write it, and its value."""
    whole = str(random.randrange(10 ** random.randrange(1, 25)))
    part = "".join(random.choices("0123456789", k=random.randrange(1, 20))) if random.random() < 0.4 else ""
    value = Fraction(int(whole)) + (Fraction(int(part), 10 ** len(part)) if part else 0)
    tail = f".{part}" if part else ""
    mark = random.choice(["", "", ",", "{,}", r"\,", "'", "_", "\u202f", "\u00a0", "，", ",\\!"])
    text = (grouped(whole, mark) if mark else whole) + tail
    kind = random.randrange(8)
    if kind == 0:
        power = random.randrange(-30, 31)
        forms = [f"e{power}", f"E{power:+}", rf" \times 10^{{{power}}}", f" × 10^{power}", f"*10**{power}"]
        text += random.choice(forms)
        value *= Fraction(10) ** power
    elif kind == 1:
        under = random.randrange(1, 10**6)
        top = int(whole)
        form = random.choice(["{}/{}", r"\frac{{{}}}{{{}}}", r"\dfrac{{ {} }}{{{}}}", "{} / {}"])
        text, value = form.format(top, under), Fraction(top, under)
    elif kind == 2 and not mark:
        text = fullwidth(text)
    sign = random.choice(["", "", "-", "−", "+", "–"])
    currency = random.choice(["", "", "$", r"\$", "€"])
    return sign + currency + text, -value if sign in ("-", "−", "–") else value


AROUND: list[Callable[[str], str]] = [
    "{}".format, "It is {}.".format, "3 + 4, so the answer is: {}".format, r"\boxed{{{}}}".format, "**{}**".format,
    "x={}\n".format, "#### {}".format, "7\n{} apples".format, '{{"answer": "{}"}}'.format, "Answer:{}!".format,
    "<answer>{}</answer>".format, r"\({}\)".format, "({})".format, "2 < {}".format, "- item 8\n- {}\n".format,
]  # fmt: skip


def check_pairs(count: int, seed: int) -> None:
    source = random.Random(seed)
    last_value, wrong = Fraction(0), []
    for _ in range(count):
        text, value = written(source)
        text = source.choice(AROUND)(text)
        found = last_number(text)
        if found is None or not are_equal(found, value):
            wrong.append((text, value, found))
        elif are_equal(found, last_value) != (value == last_value):
            wrong.append((text, last_value, found))
        last_value = value
    assert wrong == []


def test_numbers_in_texts_are_those_of_exact_arithmetic() -> None:
    check_pairs(5_000, seed=1)


@pytest.mark.slow
def test_a_hundred_thousand_numbers_in_texts_are_those_of_exact_arithmetic() -> None:
    check_pairs(100_000, seed=2)


def test_a_hundred_thousand_roots_without_an_end_are_read_at_once() -> None:
    """A search for the end from each would take hours."""
    assert last_number("\\sqrt[" * 100_000) is None
