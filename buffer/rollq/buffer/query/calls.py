"""Answers queries from the sorted sets and the groups' numbers. Payloads are read only to search texts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from rollq.buffer.calls.group_details import GROUPS_PER_TRIP, STEPPED, Looking, by_task, reward_of
from rollq.buffer.calls.replies.tasks import Clock
from rollq.buffer.common.portions import slices
from rollq.buffer.errors import QueryError
from rollq.buffer.query.conditions import Condition
from rollq.buffer.query.language import parse_query
from rollq.buffer.query.plan import Reach, ReadPlan, plan_reads, reach_of
from rollq.buffer.query.ranking import Sort, first_records
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.query.texts import texts_of
from rollq.buffer.rules.shards import shards_among
from rollq.buffer.rules.staleness import Floors, held_versions, staleness
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status
from rollq.buffer.wire.sample_outcomes import decode_outcomes

IDS_PER_TRIP = 500
"""The number of groups whose numbers are read in one round trip. With a limit, at most this many groups are read
needlessly."""

_NUMBERS = (
    "status", "arrival", "letters", "versions", "token_versions", "reward", "tries", "error", "step", "counted_in",
    "staleness", "trained_step", "left", "put_ms", "admitted_ms", "row", "samples",
)  # fmt: skip

log = logging.getLogger(__name__)


def _check_task(named: Any, tasks: Sequence[str]) -> None:
    if isinstance(named, str) and not shards_among(tasks, named):
        raise QueryError(f"task {named!r}: the run has {', '.join(sorted(tasks)) or 'no tasks'}")


class Querying(Looking):
    """Calls that search the buffer."""

    def query(
        self,
        query: Any,
        *,
        limit: int | None = None,
        sort: Sort | None = None,
        on_searched: Callable[[int], object] | None = None,
    ) -> list[GroupRecord]:
        """Return the groups that match `query` (see `rollq.buffer.query.language`), by task, then in order of arrival;
        or in the order of `sort`, which counts only samples that match a condition on single samples.

        At most `limit` groups are returned. See `matching`.

        >>> [group.uid for group in buffer.query({"status": "completed", "staleness": {"$gte": 1}}, limit=10)]
        """
        return first_records(self.matching(query, on_searched), parse_query(query), sort, limit)

    def matching(self, query: Any, on_searched: Callable[[int], object] | None = None) -> Iterator[GroupRecord]:
        """Yield the groups that match `query`, by task, then in order of arrival.

        Reads only the set ranges that the query allows (see `rollq.buffer.query.plan`), all of a task's at one instant,
        and then a few numbers per group: a group that moves in between is reported with its new status, and a group
        that leaves is left out. Raises `StoreLost`, and `QueryError`, including for a task that the run lacks.

        A search in prompts or texts reads the samples of every group that may match the rest of the query, and calls
        `on_searched` with the number of groups read. Groups with unreadable samples are logged.
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
            return self._search(condition, records, on_searched or (lambda groups: None))
        return records

    def _search(
        self, condition: Condition, candidates: Iterator[GroupRecord], on_searched: Callable[[int], object]
    ) -> Iterator[GroupRecord]:
        """Yield the candidates that match the condition, including its conditions on texts."""
        while some := list(islice(candidates, GROUPS_PER_TRIP)):
            places = [(record.task, record.uid) for record in some]
            groups = {(group.task, group.group_id): group for group in by_task(self.look, places)}
            on_searched(len(some))
            for record in some:
                group = groups.get((record.task, record.uid))
                if group is None:
                    continue  # the group has left
                if group.problem:
                    log.warning("group %d of task %r is not searched: %s", record.uid, record.task, group.problem)
                if condition.holds(record, texts_of(group.prompt.content, group.samples)):
                    yield record

    def records(self, task: str, ids: Sequence[int]) -> list[GroupRecord]:
        """The numbers of these groups, without missing groups."""
        return self._records(task, ids, self.clock(task))

    def _records_within(self, reach: Reach, task: str) -> Iterator[GroupRecord]:
        clock = self.clock(task)
        rules = clock.rules
        token_shift = rules.token_threshold - rules.stale_threshold
        what = plan_reads(reach, step=clock.step, order=rules.order, most_ids=IDS_PER_TRIP, token_shift=token_shift)
        for trip in slices(self._ids(task, what), IDS_PER_TRIP):
            yield from self._records(task, trip, clock)

    def _ids(self, task: str, what: ReadPlan) -> Sequence[int]:
        """Group ids in order of arrival, which is their numerical order."""
        if not what.scores:
            return what.ids
        ranges = [
            item for score_range in what.scores for item in (score_range.index, score_range.low, f"({score_range.high}")
        ]
        replies = self.call_task("find", task, *ranges)
        return sorted({int(member) for members in replies for member in members})

    def _records(self, task: str, ids: Sequence[int], clock: Clock) -> list[GroupRecord]:
        keys = task_keys(self.run, task)
        replies = self.send_all([("HMGET", keys.group(group_id), *_NUMBERS) for group_id in ids])
        records = [
            _record(task, group_id, clock, dict(zip(_NUMBERS, map(_text, reply), strict=True)))
            for group_id, reply in zip(ids, replies, strict=True)
            if reply[0]  # its status: otherwise it has left, or was never there
        ]
        steps = self.steps_of(task, {record.uid: Status(record.status) for record in records})
        return [
            replace(record, step=steps[record.uid], listed_step=steps[record.uid]) if record.uid in steps else record
            for record in records
        ]


_ON_THE_WAY = (Status.PENDING, Status.RUNNING)


def _text(value: bytes | None) -> str:
    return (value or b"").decode()


def _record(task: str, group_id: int, clock: Clock, fields: Mapping[str, str]) -> GroupRecord:
    """A group from its `_NUMBERS`. These lack a step that is the score in a set."""
    status, letters = fields["status"], fields["letters"]
    admitted_for, trained_step = _number(fields["step"]), _number(fields["trained_step"])
    has_left = status == Status.LEAVING and fields["left"] == "trained"
    return GroupRecord(
        uid=group_id,
        task=task,
        status=status,
        staleness=_staleness(clock, fields),
        arrival=int(fields["arrival"]),
        reward=reward_of(fields),
        tries=int(fields["tries"]),
        error=fields["error"],
        step=trained_step if has_left else admitted_for if status in _ON_THE_WAY else None,
        listed_step=trained_step or admitted_for,
        at_ms=_number(fields["put_ms"] or fields["admitted_ms"]),
        row=_number(fields["row"]),
        samples=decode_outcomes(fields["samples"], letters),
    )


def _staleness(clock: Clock, fields: Mapping[str, str]) -> int:
    status, counted_in = fields["status"], fields["counted_in"]
    if status == Status.EXPIRED and fields["staleness"]:
        return int(fields["staleness"])
    # versions may include samples that were reset; they are empty for a group that never had any
    held = held_versions(fields["letters"], fields["token_versions"] or fields["versions"])
    # a batch stays as old as it was when it was claimed
    floors = Floors() if status in STEPPED or not counted_in else clock.floors
    return staleness(clock.step, [floors.counted(int(counted_in or 0), version) for version in held])


def _number(text: str) -> int | None:
    return int(text) if text else None
