"""Looks up a row's columns by paths of names. Pure."""

from collections.abc import Mapping
from typing import Any


def look_up(row: Any, path: str, default: Any = None) -> Any:
    """Return the value at a path of dot-joined column names; `default` if there is none."""
    if not isinstance(row, Mapping):
        return default
    if path in row:
        return row[path]
    head, _, rest = path.partition(".")
    return look_up(row.get(head), rest, default) if rest else default
