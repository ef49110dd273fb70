"""Orders for many groups, which are found, inspected, and then moved one by one, each atomically.

A group whose status has changed in between is left alone, and counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder, Ordered
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.errors import ConfigError
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.values.rollouts import Status
from rollq.monitor.dashboard.orders import change_of_group
from rollq.monitor.text.units import count

MOST_GROUPS = 1000
"""The most groups in one order."""
MOST_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Found:
    """An order's groups. `missing` holds named groups that are not in the buffer. `more` says whether further groups
    were found."""

    groups: Sequence[GroupRecord]
    missing: Sequence[str] = ()
    more: bool = False


@dataclass(slots=True)
class Outcome:
    """How many groups moved, or would move, by former status, and why others did not."""

    moved: Counter[str] = field(default_factory=Counter)
    left: dict[str, str] = field(default_factory=dict)

    def note(self, group: GroupRecord, order: GroupOrder, ordered: Ordered) -> None:
        """Count a group that moves, or note why it does not move."""
        if ordered.refusal is None:
            self.moved[group.status] += 1
        else:
            self.left[name_of(group)] = change_of_group(order, ordered)


def name_of(group: GroupRecord) -> str:
    """A group's name, in the form for orders."""
    return f"{group.task}/{group.uid}"


def named_groups(buffer: Buffer, names: Sequence[str]) -> Found:
    """The groups named TASK/NUMBER. Raises `ConfigError` for a malformed name or an unknown task."""
    tasks, wanted = buffer.tasks(), [_parse(name) for name in dict.fromkeys(names)]
    if len(wanted) > MOST_GROUPS:
        raise ConfigError(f"{count(len(wanted), 'group')}: give at most {MOST_GROUPS:,} at a time")
    numbers: dict[str, list[int]] = {}
    for task, number in wanted:
        if task not in tasks:
            raise ConfigError(f"task {task!r}: the run has {', '.join(tasks) or 'none'}")
        numbers.setdefault(task, []).append(number)
    found: dict[tuple[str, int], GroupRecord] = {}
    for task, ids in numbers.items():
        found |= {(task, each.uid): each for each in buffer.query({"task": task, "uid": {"$in": ids}})}
    missing = [f"{task}/{number}" for task, number in wanted if (task, number) not in found]
    return Found([found[name] for name in wanted if name in found], missing)


def queried_groups(buffer: Buffer, query: Any, most: int | None = None) -> Found:
    """The groups that match a query, at most `most`. Raises `QueryError`."""
    most = most or MOST_GROUPS
    groups = buffer.query(query, limit=most + 1)
    return Found(groups[:most], more=len(groups) > most)


def order_groups(buffer: Buffer, order: GroupOrder, groups: Sequence[GroupRecord], *, dry_run: bool) -> Outcome:
    """Give the order for each group that still has the status in which it was found; with `dry_run`, change nothing."""
    outcome = Outcome()
    for group in groups:
        expected = Status(group.status)
        ordered = buffer.order_group(group.task, group.uid, order, dry_run=dry_run, expected=expected)
        outcome.note(group, order, ordered)
    return outcome


def effect_of(order: GroupOrder, moved: Mapping[str, int]) -> str:
    """An order's effect: numbers of groups by former status."""
    shown = ", ".join(f"{number:,} {status}" for status, number in sorted(moved.items()))
    return f"{order.value}: {shown or 'no group'}"


def left_lines(outcome: Outcome) -> Iterator[str]:
    """A line for each group that does not move, and one for the groups beyond the limit."""
    for name, why in list(outcome.left.items())[:MOST_SHOWN]:
        yield f"{name}: {why}"
    if (more := len(outcome.left) - MOST_SHOWN) > 0:
        yield f"and {count(more, 'other group')} unchanged"


def _parse(name: str) -> tuple[str, int]:
    task, slash, text = name.rpartition("/")
    if not slash or (number := whole_number(text)) is None:
        raise ConfigError(f"{name!r}: name a group as TASK/NUMBER, such as math/12")
    return task, number
