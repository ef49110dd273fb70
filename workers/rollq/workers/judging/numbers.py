r"""Numbers as people and models write them, compared exactly. Pure.

kind                   written                                                            read as
thousands separators   `1,234.5`, `12,34,567`, `1'000`, `1_000`, `1{,}000`, `1\,000`      1234.5, 1234567, 1000
signs                  `-5`, `−5` (U+2212), `$-5`, `-$5`, `x = - 5`                       -5
subtractions, dashes   `10-5`, `10 - 5`, `(a)-5`, `COVID-19`, `--5`                       5, 19
powers                 `1e-05`, `1.5 \times 10^{-5}`, `10⁻⁵`, `2^{67}`, `2**67`           exactly
fractions              `3/4`, `\frac{3}{4}`, `1 1/2`, `1\frac12`, `½`; not `1/2/2026`     exactly
exponents              `25 cm^2`                                                          25
roots and the like     `\sqrt{2}`, `\frac{\pi}{2}`, `2^x`, `1/0`                          no number

Units, currencies and a percent sign are left out: `50%` is 50. Digits of any script count.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Final

Number = Decimal | Fraction
"""An exact number: a `Fraction` if it was written as one."""

MAX_DIGITS: Final = 5000
"""Powers and fractions with more digits are not computed and do not count as numbers."""

_SAME: Final = str.maketrans({
    "−": "-", "–": "-", "－": "-", "﹣": "-", "＋": "+", "，": ",", "٬": ",", "．": ".", "٫": ".", "’": "'",
    "\u00a0": "\u2009", "\u202f": "\u2009", "⁄": "/", "∕": "/",
})  # fmt: skip
_LATEX: Final = (
    (re.compile(r"\\!|\\left|\\right"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;:]"), "\u2009"),
    (re.compile(r"\\([$%£€])"), r"\1"),
)
_VULGAR: Final = re.compile(r"[¼-¾⅐-⅞↉]")
_SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")

_GROUPS: Final = "|".join((
    *(rf"(?<!\d{mark})(?!0)\d{{1,3}}(?:{mark}\d{{3}})+(?!\d)" for mark in (",", "\u2009", "'", "_")),
    r"(?<!\d,)(?!0)\d{1,2}(?:,\d{2})+,\d{3}(?!\d)",  # the Indian form
))  # fmt: skip
_PLAIN: Final = rf"(?>(?:(?:{_GROUPS}|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?:[eE][-+]?\d+(?!\.\d))?)"
_RAISED: Final = "|".join((
    r" ?\^ ?\{ ?[-+]? ?\d+ ?\}| ?\^ ?\( ?[-+]?\d+ ?\)",
    r"(?:\^|\*\*| \^ | \*\* )[-+]?\d+(?!\.?\d)",
    "[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+",
))  # fmt: skip
_TIMES_TEN: Final = r" ?(?:[×x*·⋅∙]|\\times|\\cdot) ?10"
_TERM: Final = r"\{ ?-? ?[\d.,]+ ?\}|\d"
_FRAC: Final = r"(?:(?P<whole>(?>\d+)) ?)?\\[dtc]?frac ?"
NUMBER: Final = re.compile(
    rf"{_FRAC}(?P<over>{_TERM}) ?(?P<under>{_TERM})"
    r"|(?P<other>\\[dtc]?frac ?\{[^{}\n]*\} ?\{[^{}\n]*\}|\\sqrt ?(?:\[[^][\n]*\])? ?(?:\{[^{}\n]*\}|\d))"
    rf"|(?<![\d/])(?<!/ )(?:(?P<units>(?>\d+))[ \u2009])?(?P<top>{_PLAIN}) ?/ ?(?P<bottom>{_PLAIN})(?! ?/ ?\d)"
    rf"|(?P<factor>{_PLAIN}){_TIMES_TEN}(?P<tens>{_RAISED})"
    rf"|(?P<base>{_PLAIN})(?P<power>{_RAISED})"
    rf"|(?P<variable>{_PLAIN} ?\^)"
    rf"|(?P<plain>{_PLAIN})"
)
_BEFORE: Final = re.compile(r"(?P<previous>\S?)(?P<gap>[^\S\n]*)(?P<sign>[-+])(?P<space>[^\S\n]*)[$£€¥₹]?$")
_IS_EXPONENT: Final = re.compile(r"\^\s*[{(]?\s*[-+]?\s*$")
_REGION: Final = re.compile(r"(?<!\d)\d++(?:[.,'_\u2009]\d+)+|(?<!\d)(?!0)\d{1,3}(?: \d{3})+(?!\d)")
_WRAPPED: Final = re.compile(r"\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A number in a text; `value` is None for a text that only looks like a number."""

    start: int
    end: int
    value: Number | None


def last_number(text: str) -> Number | None:
    """The last number of a text, or None."""
    _, number = _last_in_lines(text)
    return number.value if number else None


def only_number(text: str) -> Number | None:
    """The number that, apart from whitespace and LaTeX's delimiters, is the whole text; None if there is other text."""
    text = _same(text).strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = next(part for part in wrapped.groups() if part is not None).strip()
    number = _last(text)
    return number.value if number and text[: number.start].strip() == "" == text[number.end :].strip() else None


def is_ambiguous(text: str) -> bool:
    """Whether the last number of a text can be read in several ways: `1,5`, `1.234,56`, `1 000 000`."""
    line, number = _last_in_lines(text)
    if number is None:
        return False
    regions = (
        region for region in _REGION.finditer(line) if region.start() < number.end and number.start < region.end()
    )
    return any(region.start() < number.start or number.end < region.end() for region in regions)


def number_of(value: int | float) -> Decimal:
    """Convert a number from Python or JSON, with exactly its written digits. Raises `ValueError` unless it is
    finite."""
    number = Decimal(repr(value))
    if not number.is_finite():
        raise ValueError(f"{value!r} is not a number")
    return number


def are_equal(left: Number, right: Number) -> bool:
    """Whether two numbers are the same, exactly."""
    if isinstance(left, Decimal) and isinstance(right, Decimal):
        return left == right
    first, second = (_fraction(number) for number in (left, right))
    return first is not None and first == second


def decimal_text(number: Number) -> str:
    """A number without exponent: `0.00001`, `3/4`."""
    if isinstance(number, Decimal) and not _is_long(number):
        return f"{number:f}"
    return str(number)


def with_plain_powers(text: str) -> str:
    """The text with plain decimals and fractions in place of powers and exponents, and with `-` for other minuses."""
    text, parts, end = _same(text), [], 0
    for match in NUMBER.finditer(text):
        groups = match.groupdict()
        is_power = groups["tens"] or groups["power"] or "e" in (groups["plain"] or "").lower()
        value = _value(groups) if is_power else None
        if value is None or (isinstance(value, Decimal) and _is_long(value)):
            continue
        parts += [text[end : match.start()], decimal_text(value)]
        end = match.end()
    return "".join([*parts, text[end:]])


def _last(text: str) -> Found | None:
    return next(reversed(list(_numbers(text))), None)


def _last_in_lines(text: str) -> tuple[str, Found | None]:
    """The last line of a text that has a number, and that number. Numbers do not span lines."""
    for line in reversed(_same(text).splitlines()):
        if number := _last(line):
            return line, number
    return "", None


def _numbers(text: str) -> Iterator[Found]:
    for match in NUMBER.finditer(text):
        before = text[max(0, match.start() - 12) : match.start()]
        if _IS_EXPONENT.search(before):
            continue
        signed = _BEFORE.search(before)
        is_signed = signed is not None and _is_sign(**signed.groupdict())
        value = _value(match.groupdict())
        start = match.start() - (before[-1:] in tuple("$£€¥₹"))
        if signed and is_signed:
            start = match.start() - len(before) + signed.start("sign")
            if value is not None and signed["sign"] == "-":
                value = value.copy_negate() if isinstance(value, Decimal) else -value
        yield Found(start, match.end(), value)


def _is_sign(previous: str, gap: str, sign: str, space: str) -> bool:
    """Whether a plus or minus before a number is its sign, judging by the preceding text."""
    if space:  # "x = - 5", and neither "7 - 5" nor "- 5", which is an item of a list
        return previous != "" and previous in "=<>≤≥≈≠:([{,|$×*/"
    if gap:
        return True
    return not (previous.isalnum() or (previous != "" and previous in ")]}!%°-+"))


def _value(parts: dict[str, str | None]) -> Number | None:
    try:
        if parts["over"] and parts["under"]:
            return _ratio(parts["whole"], parts["over"].strip("{}"), parts["under"].strip("{}"))
        if parts["top"] and parts["bottom"]:
            return _ratio(parts["units"], parts["top"], parts["bottom"])
        if parts["factor"] and parts["tens"]:
            sign, digits, exponent = _decimal(parts["factor"]).as_tuple()
            return Decimal((sign, digits, int(exponent) + _integer(parts["tens"])))
        if parts["base"] and parts["power"]:
            return _raised(_decimal(parts["base"]), _integer(parts["power"]))
        return _decimal(parts["plain"]) if parts["plain"] else None
    except (ArithmeticError, ValueError):  # divided by zero, or too long
        return None


def _ratio(whole: str | None, over: str, under: str) -> Number:
    top, bottom = _short(_decimal(over)), _short(_decimal(under))
    ratio = Fraction(top) / Fraction(bottom)
    return ratio if whole is None or ratio < 0 or ratio >= 1 else int(whole) + ratio


def _raised(base: Decimal, power: int) -> Number:
    if (len(_short(base).as_tuple().digits) + abs(int(base.as_tuple().exponent))) * abs(power) > MAX_DIGITS:
        raise ValueError("too long")
    return Fraction(base) ** power


def _decimal(written: str) -> Decimal:
    return Decimal(re.sub(r"[,'_\s\u2009]", "", written))


def _integer(raised: str) -> int:
    return int(re.sub(r"[^\d+-]", "", raised.translate(_SUPERSCRIPTS)))


def _fraction(number: Number) -> Fraction | None:
    if isinstance(number, Fraction):
        return number
    return None if _is_long(number) else Fraction(number)


def _short(number: Decimal) -> Decimal:
    if _is_long(number):
        raise ValueError("too long")
    return number


def _is_long(number: Decimal) -> bool:
    _, digits, exponent = number.as_tuple()
    return len(digits) > MAX_DIGITS or abs(int(exponent)) > MAX_DIGITS


def _same(text: str) -> str:
    """The text with one character for each sign and separator, in place of LaTeX's spellings."""
    text = text.translate(_SAME)
    text = _VULGAR.sub(lambda match: " " + unicodedata.normalize("NFKC", match[0]).translate(_SAME), text)
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text
