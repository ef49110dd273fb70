"""Checks an environment without a model: first its rows, then, with the kind's check, its graders or episodes."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Final

from rollq.buffer.errors import ConfigError
from rollq.environments.expansion import Environment
from rollq.environments.kinds import Finding, Level
from rollq.environments.rows import PATIENCE, REPORT_S, digest_of, made_rows, unstable_rows
from rollq.environments.time_limits import TimeLimit, every

MAKING_S: Final = 120.0
"""The time limit for making rows, for each split and hash seed."""
OTHER_SPLIT: Final = "test"
MANY: Final = 0.5
"""If at least this share of rows is repeated, the environment has few different rows."""


def check(environment: Environment, rows: int, tell: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Yield the findings about the first `rows` rows. `tell` gets a line every `REPORT_S`, from a thread. Raises
    `ConfigError` for an environment that cannot be opened."""
    source = environment.open()
    if not environment.makes_rows:
        yield from source.check([])
        return
    made: list[dict[str, object]] = []
    limit = TimeLimit(MAKING_S)
    with (
        every(REPORT_S, lambda: tell(f"{len(made)} of {rows} rows are made")),
        closing(made_rows(environment, limit=limit)) as making,
    ):
        made.extend(islice(making, rows))
    if limit.is_over:
        said = f"{len(made)} of {rows} rows were checked: making more takes longer than {MAKING_S:g} s"
        yield Finding(Level.WARNING, said)
    if not made:
        yield Finding(Level.ERROR, "there are no rows")
        return
    yield Finding(Level.NOTE, f"{len(made)} rows")
    yield from _form(made)
    with every(REPORT_S, lambda: tell(f"{len(made)} rows are checked")):
        yield from _repeats(made, _test_rows(environment, rows))
        if unstable := unstable_rows(environment, UNSTABLE_ROWS, made, TimeLimit(MAKING_S)):
            text = f"rows depend on the hash seed: {unstable} of the first {min(len(made), UNSTABLE_ROWS)} differ"
            yield Finding(Level.WARNING, f"{text}; rollq makes and judges all of them under hash seed 0")
        yield from source.check(made)


UNSTABLE_ROWS: Final = 50
"""How many of the first rows are made again under another hash seed."""


def _form(rows: list[dict[str, object]]) -> Iterator[Finding]:
    """Rows without a prompt."""
    bad = [index for index, row in enumerate(rows) if not (row.get("prompt") or row.get("messages"))]
    if bad:
        yield Finding(Level.ERROR, f"{len(bad)} rows have neither a prompt nor messages", bad[0])


def _repeats(rows: list[dict[str, object]], test: list[dict[str, object]]) -> Iterator[Finding]:
    """Rows that repeat other rows, and rows that the other split also contains."""
    digests = [digest_of(row) for row in rows]
    different = len(set(digests))
    if different < len(rows):
        level = Level.WARNING if different < MANY * len(rows) else Level.NOTE
        yield Finding(level, f"{different} of {len(rows)} rows are different; repeats are left out")
    shared = len(set(digests) & {digest_of(row) for row in test})
    if shared:
        yield Finding(
            Level.NOTE, f"{shared} of them are in split {OTHER_SPLIT!r}; a task leaves out the rows of its evaluation"
        )


def _test_rows(environment: Environment, rows: int) -> list[dict[str, object]]:
    """The other split's rows; empty without another split."""
    if environment.split == OTHER_SPLIT:
        return []
    other = replace(environment, split=OTHER_SPLIT)
    try:
        with closing(made_rows(other, limit=TimeLimit(MAKING_S))) as making:
            return list(islice(making, min(rows, PATIENCE)))
    except ConfigError:
        return []
