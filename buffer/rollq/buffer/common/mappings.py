"""Parts of mappings. Pure."""

from collections.abc import Container, Mapping
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def without(mapping: Mapping[K, V], names: Container[K]) -> dict[K, V]:
    """The entries of `mapping` whose names are not in `names`."""
    return {name: value for name, value in mapping.items() if name not in names}


def filled(mapping: Mapping[K, V]) -> dict[K, V]:
    """The entries with a value that is not None, 0, False or empty."""
    return {name: value for name, value in mapping.items() if value}
