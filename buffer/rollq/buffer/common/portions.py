"""Items in portions of limited size, or in slices of equal length."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import TypeVar

T = TypeVar("T")


def portions(
    items: Iterable[T], size: Callable[[T], float], most: float, *, most_items: float = inf
) -> Iterator[list[T]]:
    """Yield the items in portions of at most `most_items`, in order. A portion's item sizes add up to at most `most`; a
    larger item gets a separate portion."""
    portion: list[T] = []
    taken = 0.0
    for item in items:
        item_size = size(item)
        if portion and (taken + item_size > most or len(portion) >= most_items):
            yield portion
            portion, taken = [], 0.0
        portion.append(item)
        taken += item_size
    if portion:
        yield portion


def slices(items: Sequence[T], most_items: int) -> Iterator[Sequence[T]]:
    """Yield the items in slices of `most_items`, in order; the last slice may be shorter."""
    return (items[start : start + most_items] for start in range(0, len(items), most_items))
