"""Rows that an operator excludes from a task's prompts: producers no longer admit them. A row is stored with the digest
of its prompts, so that it never refers to another file's row.
"""

from collections.abc import Iterable, Sequence

from rollq.buffer.calls.inspection import Inspection
from rollq.buffer.calls.orders import GroupOrder, Steering
from rollq.buffer.calls.tasks import Registry, encode_record
from rollq.buffer.common.portions import slices
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.shards import shard_names, shard_of
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status

MOST_EXCLUDED_ROWS = 1000
"""The most rows of a task or shard that may be excluded; to exclude more, change the prompt file."""
MOST_NAMED = 20
"""The most rows that a change record names."""
WAITING = (Status.PENDING, Status.ABORTED, Status.EXPIRED)
"""Statuses of groups that wait for a worker."""
_RULES_MOVED, _OTHER_PROMPTS = -1, -2
"""Replies of the function if the rules or the prompts changed after its caller read them."""


class Excluding(Registry, Steering, Inspection):
    """Calls that exclude rows from a task's prompts, and include them again."""

    def exclude_rows(self, task: str, rows: Sequence[int], *, undo: bool = False) -> list[int]:
        """Exclude rows (from 0) from the prompts, or include them again with `undo`; returns the rows that change. An
        excluded row counts as done in every pass. Its existing groups stay; see `drop_waiting`. Raises `ConfigError`
        for an evaluation, for a task without prompts, for missing rows, and for too many rows.
        """
        at_first: list[int] | None = None  # a repeat after a lost reply finds nothing left to change
        while True:
            clock = self.clock(task)
            (digest, count), known = self._recorded_prompts(task), self.excluded_rows(task).rows
            self._check_rows(task, rows, count)
            changed = sorted(set(rows) & known if undo else set(rows) - known)
            at_first = changed if at_first is None else at_first
            after = len(known) - len(changed) if undo else len(known) + len(changed)
            if not changed:
                return at_first
            self._check_number(task, after, count)
            now = f"{after} ({_named(changed, undo)})"
            record, _, _ = encode_record({"excluded_rows": (f"{len(known)}", now)}, None)
            reply = self.call_task("exclude_rows", task, clock.rules_revision, record, digest, int(undo), *changed)
            if reply == _OTHER_PROMPTS:
                raise ConfigError(f"the prompts of task {task} have just changed: look up the rows again")
            if reply != _RULES_MOVED:
                return at_first

    def drop_waiting(self, task: str, rows: Iterable[int]) -> int:
        """Drop these rows' groups that wait for a worker; returns how many. Other groups stay: their samples are
        already paid for."""
        wanted, dropped = {str(row).encode() for row in rows}, 0
        first = int(self.counts(task).progress.get("prompts_from", 1))
        keys = task_keys(self.run, task)
        for status in WAITING:
            ids = [int(member) for member in self.send("ZRANGE", keys.status(status), 0, -1) if int(member) >= first]
            for some in slices(ids, MOST_EXCLUDED_ROWS):
                found = self.send_all([("HGET", keys.group(group_id), "row") for group_id in some])
                for group_id in [each for each, row in zip(some, found, strict=True) if row in wanted]:
                    dropped += self.order_group(task, group_id, GroupOrder.DROP, expected=status).refusal is None
        return dropped

    def _recorded_prompts(self, task: str) -> tuple[str, int]:
        """The digest and number of rows of a task's prompts. Raises `ConfigError` for an evaluation, and for a
        task without prompts."""
        if self.rules(task).kind == "eval":
            raise ConfigError(f"task {task!r}: an evaluation uses all of its rows; take them out of its file")
        digest, rows = self.send("HMGET", task_keys(self.run, task).prompt_file, "digest", "rows")
        if digest is None:
            raise ConfigError(f"task {task!r} has no prompts yet: its first producer names them")
        return digest.decode(), int(rows)

    def _check_rows(self, task: str, rows: Sequence[int], count: int) -> None:
        name, number, total = shard_of(task)
        for row in rows:
            if not 0 <= row < count:
                raise ConfigError(f"row {row}: the prompts of task {task} have the rows 0 to {count - 1:,}")
            if row % total != number - 1:
                raise ConfigError(
                    f"row {row} belongs to the shard {shard_names(name, total)[row % total]}, not to {task}"
                )

    def _check_number(self, task: str, excluded: int, count: int) -> None:
        _, number, total = shard_of(task)
        if excluded > MOST_EXCLUDED_ROWS:
            raise ConfigError(
                f"{excluded:,} excluded rows of task {task}: at most {MOST_EXCLUDED_ROWS:,}; take more out of its file"
            )
        if excluded >= len(range(number - 1, count, total)):
            raise ConfigError(f"no row of task {task} would be left; `rollq set {task} batch_groups=0` retires it")


def _named(rows: Sequence[int], undo: bool) -> str:
    word, shown = "without" if undo else "with", ", ".join(map(str, rows[:MOST_NAMED]))
    return f"{word} {shown}" + (f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else "")
