"""Hostile inputs, made from sound ones. Pure: the same generator gives the same input."""

import random
from collections.abc import Sequence
from typing import Any

NUMBERS = (
    "0", "-1", "1", "2", "1.5", "nan", "inf", "-inf", "1e308", "-0", "0x10", " 1", "1 ", "+1", "4294967296",
    "9007199254740993", "9223372036854775808", "99999999999999999999", "-9223372036854775809",
)  # fmt: skip
TEXTS = ("", "x", "..", "a:b{c}*", "\r\n", "%s%d%n", "{}", "[]", "null", ",", "1,2,,3", "-,-", "0:1,2:x", "ä" * 50)
HOSTILE: tuple[bytes, ...] = (*(text.encode() for text in (*NUMBERS, *TEXTS)), b"\x00", b"\xff\xfe\x80", b"y" * 10_000)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**80, 1e308, float("nan"), "", "x", "../x", "1", [], [[]], [-1], {}, {"x": 1},
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with one to three changes: bits, bytes, slices, its end."""
    for _ in range(rng.randint(1, 3)):
        data = rng.choice((_flip, _overwrite, _truncate, _delete, _repeat, _insert))(rng, data)
    return data


def _flip(rng: random.Random, data: bytes) -> bytes:
    if not data:
        return b"\x00"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at + 8 :]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randint(0, len(data))]


def _delete(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + data[at + rng.randint(1, 16) :]


def _repeat(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + data[max(0, at - rng.randint(1, 16)) :]


def _insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.choice(HOSTILE)[:64] + data[at:]


def mutate_json(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which one part, however deep, is replaced, left out or added to."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        return _mutate_object(rng, value)
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        changed = [] if rng.random() < 0.15 else [mutate_json(rng, value[at])] * rng.choice((1, 1, 1, 2))
        return [*value[:at], *changed, *value[at + 1 :]]
    return rng.choice(VALUES)


def _mutate_object(rng: random.Random, value: dict[str, Any]) -> dict[str, Any]:
    name = rng.choice(sorted(value))
    changed = {key: part for key, part in value.items() if key != name}
    if rng.random() < 0.15:
        return changed
    if rng.random() < 0.1:
        return {**changed, rng.choice(TEXTS): value[name]}
    return {**changed, name: mutate_json(rng, value[name])}


def mutate_words(rng: random.Random, words: Sequence[bytes]) -> list[bytes]:
    """A command's arguments with one to three changes: a word replaced, left out, repeated or exchanged."""
    changed = list(words)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(changed)) if changed else 0
        draw = rng.random()
        if draw < 0.7 and changed:
            changed[at] = _mutate_word(rng, changed[at])
        elif draw < 0.8:
            del changed[at : at + 1]
        elif draw < 0.9:
            changed.insert(at, rng.choice(HOSTILE))
        elif changed:
            other = rng.randrange(len(changed))
            changed[at], changed[other] = changed[other], changed[at]
    return changed


def _mutate_word(rng: random.Random, word: bytes) -> bytes:
    draw = rng.random()
    if draw < 0.6:
        return rng.choice(HOSTILE)
    if draw < 0.8 and word.removeprefix(b"-").isdigit():
        return b"%d" % (int(word) + rng.choice((-2, -1, 1, 2, 1000)))
    return mutate_bytes(rng, word)
