"""A frame that is written part by part, so that its arrays are not copied into one value."""

from collections.abc import Iterable
from typing import Any

import numpy as np


class Pieces:
    """An unjoined frame. Its parts are the arrays that it was made from, which must not change while it exists."""

    def __init__(self, parts: Iterable[Any]) -> None:
        """`parts` are contiguous arrays or bytes."""
        self.parts = list(map(_as_bytes, parts))
        self._size_bytes = sum(map(len, self.parts))

    def __len__(self) -> int:
        """The frame's size in bytes."""
        return self._size_bytes

    def __bytes__(self) -> bytes:
        """The frame, joined."""
        return b"".join(self.parts)


def _as_bytes(part: Any) -> bytes | memoryview:
    return part.data.cast("B") if isinstance(part, np.ndarray) and part.size else bytes(part)
