"""Values that TOML can express. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from rollq.cli.settings.migration.readings import LARGEST
from rollq.cli.settings.migration.values import Placeholder, are_all

MOST_PARTS: Final = 2_000
DEEPEST: Final = 10

Place = tuple[str, ...]


def is_plain(value: Any) -> bool:
    """Whether TOML can express this value, and the value is small enough for rollq to write."""
    left, parts = [(value, 0)], 0
    while left:
        one, depth = left.pop()
        parts += 1
        inside = _inside(one)
        if inside is None or parts > MOST_PARTS or depth > DEEPEST:
            return False
        left += [(item, depth + 1) for item in inside]
    return True


def _inside(value: Any) -> Iterable[Any] | None:
    """The parts of a value; None for a value that TOML does not have."""
    if isinstance(value, dict):
        return value.values() if are_all(str, value) else None
    if isinstance(value, list | tuple):
        return value[: MOST_PARTS + 1]
    if not isinstance(value, int | float | str):
        return None
    return None if isinstance(value, int) and abs(value) >= LARGEST else ()


def without_unknown(value: Any) -> tuple[Any, list[tuple[Place, Any]]]:
    """A value without the parts that TOML cannot express, and those parts with their places.

    The value is None if no part is left. Names of environment variables stay in their texts.
    """
    if is_plain(value):
        return value, []
    if not isinstance(value, dict):
        return None, [((), value)]
    return _kept(value, ())


def _kept(value: dict[Any, Any], place: Place) -> tuple[dict[str, Any], list[tuple[Place, Any]]]:
    kept: dict[str, Any] = {}
    left: list[tuple[Place, Any]] = []
    for key, item in list(value.items())[:MOST_PARTS]:
        text = item.text if isinstance(item, Placeholder) else item
        if isinstance(key, str) and is_plain(text):
            kept[key] = text
        elif isinstance(text, dict) and isinstance(key, str) and len(place) < DEEPEST:
            kept[key], more = _kept(text, (*place, key))
            left += more
        else:
            left.append(((*place, str(key)), item))
    return kept, left
