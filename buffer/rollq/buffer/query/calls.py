"""Queries, answered from the sorted sets and the groups' numbers. Payloads are read only to search texts."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rollq.buffer.calls.group_details import GROUPS_PER_TRIP, Looking
from rollq.buffer.calls.replies import Clock
from rollq.buffer.errors import QueryError
from rollq.buffer.query.language import Condition, GroupRecord, parse_query
from rollq.buffer.query.plan import Reach, ReadPlan, plan_reads, reach_of
from rollq.buffer.query.texts import texts_of
from rollq.buffer.rules.shards import shards_among
from rollq.buffer.rules.staleness import Floors, staleness
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status

IDS_PER_TRIP = 500
"""Groups whose numbers are read in one trip. With a limit, at most this many are read in vain."""

_NUMBERS = (
    "status", "arrival", "letters", "versions", "token_versions", "reward", "tries", "error", "step", "counted_in",
    "staleness",
)  # fmt: skip

log = logging.getLogger(__name__)


def _check_task(named: Any, tasks: Sequence[str]) -> None:
    if isinstance(named, str) and not shards_among(tasks, named):
        raise QueryError(f"task {named!r}: the run has {', '.join(sorted(tasks)) or 'no tasks'}")


class Querying(Looking):
    """Calls that search the buffer."""

    def query(
        self, query: Any, *, limit: int | None = None, on_searched: Callable[[int], object] | None = None
    ) -> list[GroupRecord]:
        """The groups for which `query` holds (see `rollq.buffer.query.language`), by task, then in order of arrival.

        Reads only the ranges of sets that the query leaves (see `rollq.buffer.query.plan`), all of a task at one
        instant, and then a few numbers of each group: a group that moves in between is reported with its new status,
        and a group that leaves is left out. `limit`: the most groups to return. Raises `QueryError`, including for a
        task that the run does not have, and `StoreLost`.

        A search in prompts or texts reads the samples of every group for which the rest of the query may hold, until
        the limit is reached; `on_searched` is called with the number of groups that were read. Groups whose samples
        cannot be read are logged.

        >>> [group.uid for group in buffer.query({"status": "completed", "staleness": {"$gte": 1}}, limit=10)]
        """
        condition, tasks = parse_query(query), self.tasks()
        _check_task(query.get("task"), tasks)
        reach = reach_of(condition, frozenset(tasks))
        looked_at = (
            record
            for task in (() if reach.is_empty else sorted(reach.tasks))
            for record in self._records_within(reach, task)
        )
        records: Iterator[GroupRecord] = filter(condition.holds, looked_at)
        if condition.searches_texts:
            records = self._search(condition, records, on_searched or (lambda groups: None))
        return list(islice(records, limit))

    def _search(
        self, condition: Condition, candidates: Iterator[GroupRecord], on_searched: Callable[[int], object]
    ) -> Iterator[GroupRecord]:
        """Those candidates for which the condition holds with their texts."""
        while some := list(islice(candidates, GROUPS_PER_TRIP)):
            by_task: dict[str, list[int]] = {}
            for record in some:
                by_task.setdefault(record.task, []).append(record.uid)
            groups = {
                (task, candidate.group_id): candidate
                for task, ids in by_task.items()
                for candidate in self.look(task, ids)
            }
            on_searched(len(some))
            for record in some:
                group = groups.get((record.task, record.uid))
                if group is None:
                    continue  # it has left
                if group.problem:
                    log.warning("group %d of task %r is not searched: %s", record.uid, record.task, group.problem)
                if condition.holds(record, texts_of(group.prompt.content, group.samples)):
                    yield record

    def _records_within(self, reach: Reach, task: str) -> Iterator[GroupRecord]:
        clock = self.clock(task)
        rules = clock.rules
        token_shift = rules.token_threshold - rules.stale_threshold
        what = plan_reads(reach, step=clock.step, order=rules.order, most_ids=IDS_PER_TRIP, token_shift=token_shift)
        ids = self._ids(task, what)
        for start in range(0, len(ids), IDS_PER_TRIP):
            yield from self._records(task, ids[start : start + IDS_PER_TRIP], clock)

    def _ids(self, task: str, what: ReadPlan) -> Sequence[int]:
        """Group ids in order of arrival: they count up with it."""
        if not what.scores:
            return what.ids
        ranges = [
            item for score_range in what.scores for item in (score_range.index, score_range.low, f"({score_range.high}")
        ]
        replies = self.call_task("find", task, *ranges)
        return sorted({int(member) for members in replies for member in members})

    def _records(self, task: str, ids: Sequence[int], clock: Clock) -> Iterator[GroupRecord]:
        keys = task_keys(self.run, task)
        replies = self.send_all([("HMGET", keys.group(group_id), *_NUMBERS) for group_id in ids])
        records = []
        for group_id, reply in zip(ids, replies, strict=True):
            status, *texts = ((value or b"").decode() for value in reply)
            if status:  # otherwise it has left, or was never there
                records.append(_record(task, group_id, clock, status, *texts))
        claimed = [record for record in records if record.status in _CLAIMED]
        scores = self.send_all([("ZSCORE", keys.status(Status(member.status)), member.uid) for member in claimed])
        steps = {record.uid: score for record, score in zip(claimed, scores, strict=True) if score is not None}
        for record in records:
            yield replace(record, step=int(steps[record.uid])) if record.uid in steps else record


_CLAIMED = (Status.CLAIMED, Status.ARCHIVED)
_ON_THE_WAY = (Status.PENDING, Status.RUNNING)


def _record(
    task: str, group_id: int, clock: Clock, status: str, arrival: str, letters: str, counted: str, *rest: str
) -> GroupRecord:
    token_versions, reward, tries, error, admitted_for, counted_in, expired_with = rest
    # versions may still speak of samples that were reset; of a group that had none yet they are empty
    versions = (token_versions or counted).split(",")
    held = [version for letter, version in zip(letters, versions, strict=False) if letter != "p"]
    # a batch stays as old as it was when it was claimed
    floors = Floors() if status in _CLAIMED or not counted_in else clock.floors
    is_expired = status == Status.EXPIRED
    counted_as = [floors.counted(int(counted_in or 0), int(version)) for version in held if version != "-"]
    return GroupRecord(
        uid=group_id,
        task=task,
        status=status,
        staleness=int(expired_with) if is_expired and expired_with else staleness(clock.step, counted_as),
        arrival=int(arrival),
        reward=float(reward) if reward and "c" in letters else None,
        tries=int(tries),
        error=error,
        step=int(admitted_for) if status in _ON_THE_WAY else None,
    )
