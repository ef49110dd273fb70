"""Values that TOML has. Pure."""

from typing import Any, Final

from rollq.cli.settings.migration.readings import LARGEST
from rollq.cli.settings.migration.values import Placeholder

MOST_PARTS: Final = 2_000
DEEPEST: Final = 10

Place = tuple[str, ...]


def is_plain(value: Any) -> bool:
    """Whether TOML has this value, and rollq would write it: it is not very large."""
    left, depth = [(value, 0)], 0
    parts = 0
    while left:
        one, depth = left.pop()
        parts += 1
        if parts > MOST_PARTS or depth > DEEPEST:
            return False
        if isinstance(one, dict):
            if not all(isinstance(key, str) for key in one):
                return False
            left += [(item, depth + 1) for item in one.values()]
        elif isinstance(one, list | tuple):
            left += [(item, depth + 1) for item in one[: MOST_PARTS + 1]]
        elif (isinstance(one, int) and abs(one) >= LARGEST) or not isinstance(one, int | float | str):
            return False
    return True


def without_unknown(value: Any) -> tuple[Any, list[tuple[Place, Any]]]:
    """A value without the parts that TOML does not have, and those parts with their places.

    The value is None if nothing is left of it. Names of environment variables stay in their texts.
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
