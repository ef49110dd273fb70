"""What the protocols share when they read requests."""

from typing import Any

import orjson
import pytest

from rollq.workers.gateway.calls import CallRefused
from rollq.workers.gateway.protocols import fields


@pytest.mark.parametrize(
    ("said", "repeats"),
    [("0", 0), ("2", 2), ("999", 999), ("1000", 0), ("-1", 0), ("two", 0), ("", 0), ("²", 0), ("١", 0)],
)
def test_a_count_of_repeats_is_a_small_number_or_none(said: str, repeats: int) -> None:
    assert fields.repeats({"x-stainless-retry-count": said}) == repeats
    assert fields.repeats({}) == 0


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


def test_an_object_that_is_accepted_leaves_room_for_what_is_written_around_it() -> None:
    accepted = [levels for levels in range(230, 256) if is_accepted(nested(levels))]
    assert accepted == list(range(230, accepted[-1] + 1))
    around: Any = nested(accepted[-1])
    assert fields.json_text(around, "input") == orjson.dumps(around).decode()
    for _ in range(16):
        around = [around]
    assert orjson.dumps(around)
    with pytest.raises(TypeError):
        orjson.dumps([around])


def is_accepted(value: Any) -> bool:
    try:
        fields.json_text(value, "input")
    except CallRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("value", "label"),
    [
        ("image", "image"),
        ("i" * 50, "i" * 40),
        ("a\nb", r"'a\nb'"),
        ("\ud800", r"'\ud800'"),
        (None, "null"),
        ([[]], "a list"),
        (b"", "another value"),
    ],
)
def test_a_label_can_be_put_in_any_message(value: Any, label: str) -> None:
    assert fields.label(value) == label
