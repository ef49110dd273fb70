"""A task with `shards = n` becomes n tasks in the buffer, such as `math.1of3`, `math.2of3` and `math.3of3`. Pure.

On a cluster, everything that a task's functions touch is on one primary; shards are in different slots, so several
primaries share the work. The batch and the bounds are split when settings become tasks in the buffer. After that,
shards are tasks like all others, until a result is shown by task.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.buffer.rules.names import check_name

MAX_SHARDS = 64

Number = TypeVar("Number", int, float)

_SHARD: Final = re.compile(r"(.+)\.([1-9]\d*)of([1-9]\d*)")


class Shard(NamedTuple):
    """Shard `number` (from 1) of the `total` shards of `task`."""

    task: str
    number: int
    total: int


def shard_names(task: str, count: int) -> list[str]:
    """Names of a task's shards; the task itself if `count` is 1. Raises `ConfigError` for a name that is too long."""
    if count == 1:
        return [task]
    return [check_name("task", f"{task}.{number}of{count}") for number in range(1, count + 1)]


def shard_of(name: str) -> Shard:
    """The shard that a buffer task's name names; the only shard if the name has no number."""
    matched = _SHARD.fullmatch(name)
    if matched is None:
        return Shard(name, 1, 1)
    task, number, total = matched.groups()
    return Shard(task, int(number), int(total))


def task_of(name: str) -> str:
    """The task in `rollq.toml` that a buffer task belongs to."""
    return shard_of(name).task


def shards_among(known: Iterable[str], task: str) -> list[str]:
    """The names in `known` that are `task` or its shards."""
    return [name for name in known if task in (name, task_of(name))]


def check_task_name(name: str) -> str:
    """Return the name of a task in `rollq.toml`. Raises `ConfigError` if the name does not fit into keys or looks like
    a shard's name."""
    check_name("task", name)
    if task_of(name) != name:
        raise ConfigError(f"task name {name!r}: names of this form belong to shards; choose another")
    return name


def split(groups: int, count: int) -> list[int]:
    """Split `groups` into `count` parts, as evenly as possible; the first parts get the remainder."""
    each, left_over = divmod(groups, count)
    return [each + (index < left_over) for index in range(count)]


def _split_schedule(schedule: Sequence[tuple[int, int]], count: int) -> list[tuple[tuple[int, int], ...]]:
    parts = [(step, split(groups, count)) for step, groups in schedule]
    return [tuple((step, groups[index]) for step, groups in parts) for index in range(count)]


def _split_window(groups: int, count: int) -> list[int]:
    """Each shard's share, rounded up so that it is never 0; the special values 0 and -1 stay."""
    return [math.ceil(groups / count) if groups > 0 else groups] * count


SHARED: Final[Mapping[str, Callable[[Any, int], Sequence[Any]]]] = {
    "audit_groups": split,
    "batch_groups": split,
    "keep_window": _split_window,
    "schedule": _split_schedule,
    "tail_batch_trigger_size": _split_window,
}
"""A task's rules that are group counts, and how its shards share them."""


def split_rules(rules: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Divide some of a task's rules (name -> value) among its `count` shards."""
    parts = {name: SHARED[name](value, count) if name in SHARED else [value] * count for name, value in rules.items()}
    return [{name: values[index] for name, values in parts.items()} for index in range(count)]


def add_up(shards: Iterable[Mapping[str, Number]]) -> dict[str, Number]:
    """Sum each named number over all shards."""
    total: dict[str, Number] = {}
    for shard in shards:
        for name, number in shard.items():
            total[name] = total[name] + number if name in total else number
    return total


def check_shards(known: Iterable[str], wanted: Iterable[str]) -> None:
    """Compare a run's or snapshot's tasks, `known`, with the settings' tasks, `wanted`.

    Raises `RunMismatch` naming the setting when a task has another number of shards.
    """
    asked = {shard.task: shard.total for shard in map(shard_of, wanted)}
    for name in known:
        task, _, total = shard_of(name)
        if asked.get(task, total) != total:
            raise RunMismatch(
                f"task {task!r} was created with shards = {total}, the settings ask for shards = {asked[task]}: the "
                "number of shards is fixed for the whole run; change it back, or begin a new run"
            )
