"""The first rows of environments, which may have no end of them."""

from contextlib import closing
from itertools import islice
from typing import Any

from rollq.environments.kinds import Source


def first_rows(source: Source, count: int) -> list[dict[str, Any]]:
    """The first `count` rows."""
    rows: Any = source.rows()
    with closing(rows):
        return list(islice(rows, count))
