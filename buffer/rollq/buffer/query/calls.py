"""Queries, answered from the sorted sets and the groups' numbers; payloads are never read."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from rollq.buffer.core import BufferCore
from rollq.buffer.query.language import GroupRecord, parse_query
from rollq.buffer.query.plan import Reach, ReadPlan, plan_reads, reach_of
from rollq.buffer.staleness import staleness
from rollq.buffer.store.keys import task_keys

IDS_PER_TRIP = 500
"""Groups whose numbers are read in one trip. With a limit, at most this many are read in vain."""

_NUMBERS = ("status", "arrival", "letters", "versions", "token_versions", "reward", "tries", "error")


class Querying(BufferCore):
    """Calls that search the buffer."""

    def query(self, query: Any, *, limit: int | None = None) -> list[GroupRecord]:
        """The groups for which `query` holds (see `rollq.buffer.query.language`), by task, then in order of arrival.

        Reads only the ranges of sets that the query leaves (see `rollq.buffer.query.plan`), all of a task at one
        instant, and then a few numbers of each group: one that moves in between is reported with its new
        status, and one that leaves is left out. With `limit`, at most that many. Raises `QueryError`, `StoreLost`.

        >>> [group.uid for group in buffer.query({"status": "completed", "staleness": {"$gte": 1}}, limit=10)]
        """
        condition = parse_query(query)
        reach = reach_of(condition, frozenset(self.tasks()))
        looked_at = (
            record
            for task in (() if reach.is_empty else sorted(reach.tasks))
            for record in self._records_within(reach, task)
        )
        return list(islice(filter(condition.holds, looked_at), limit))

    def _records_within(self, reach: Reach, task: str) -> Iterator[GroupRecord]:
        clock = self.clock(task)
        rules = clock.rules
        token_shift = rules.token_threshold - rules.stale_threshold
        what = plan_reads(reach, step=clock.step, order=rules.order, most_ids=IDS_PER_TRIP, token_shift=token_shift)
        ids = self._ids(task, what)
        for start in range(0, len(ids), IDS_PER_TRIP):
            yield from self._records(task, ids[start : start + IDS_PER_TRIP], clock.step)

    def _ids(self, task: str, what: ReadPlan) -> Sequence[int]:
        """Group ids in order of arrival: they count up with it."""
        if not what.scores:
            return what.ids
        ranges = [item for one in what.scores for item in (one.index, one.low, f"({one.high}")]
        found = self.call_task("find", task, *ranges)
        return sorted({int(member) for members in found for member in members})

    def _records(self, task: str, ids: Sequence[int], step: int) -> Iterator[GroupRecord]:
        keys = task_keys(self.run, task)
        replies = self.send_all([("HMGET", keys.group(group_id), *_NUMBERS) for group_id in ids])
        for group_id, reply in zip(ids, replies, strict=True):
            status, *texts = ((value or b"").decode() for value in reply)
            if status:  # else it left meanwhile, or never came
                yield _record(task, group_id, step, status, *texts)


def _record(
    task: str, group_id: int, step: int, status: str, arrival: str, letters: str, counted: str, *rest: str
) -> GroupRecord:
    token_versions, reward, tries, error = rest
    # versions may still speak of samples that were reset; of a group that had none yet they are empty
    versions = (token_versions or counted).split(",")
    held = [version for letter, version in zip(letters, versions, strict=False) if letter != "p"]
    return GroupRecord(
        uid=group_id,
        task=task,
        status=status,
        staleness=staleness(step, [int(version) for version in held if version != "-"]),
        arrival=int(arrival),
        reward=float(reward) if reward and "c" in letters else None,
        tries=int(tries),
        error=error,
    )
