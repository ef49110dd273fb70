"""Queries, answered from the sorted sets and the groups' numbers; payloads are never read."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from rollq.buffer.core import BufferCore, task_keys
from rollq.buffer.query import Condition, Record, parse_query
from rollq.buffer.schema import Status

IDS_PER_TRIP = 500
_NO_TOKENS = 1048575


class Asking(BufferCore):
    """Calls of people who look into the buffer."""

    def query(self, query: Any, *, limit: int | None = None) -> list[Record]:
        """The groups for which `query` holds (see `rollq.buffer.query`), by task, then in order of arrival.

        Only the sets of statuses that the query allows are read, and of their groups a few numbers each. Groups that
        move meanwhile are told where they are found. Raises `QueryError`.
        """
        condition = parse_query(query)
        return list(islice(self._matching(condition), limit))

    def _matching(self, condition: Condition) -> Iterator[Record]:
        statuses = sorted(condition.statuses())
        for task in sorted(condition.tasks(frozenset(self.tasks()))) if statuses else ():
            step = self.clock(task).step
            ids = self._ids(task, statuses)
            for start in range(0, len(ids), IDS_PER_TRIP):
                for record in self._records(task, ids[start : start + IDS_PER_TRIP], step):
                    if condition.holds(record):
                        yield record

    def _ids(self, task: str, statuses: list[Status]) -> list[int]:
        """Group ids in these statuses; ids count up with arrival."""
        keys = task_keys(self.run, task)
        sets = self._read_all([("ZRANGE", keys.status(status), 0, -1) for status in statuses])
        return sorted({int(found) for members in sets for found in members})

    def _records(self, task: str, ids: list[int], step: int) -> Iterator[Record]:
        keys = task_keys(self.run, task)
        wanted = ("status", "arrival", "oldest", "reward", "tries", "letters")
        for group_id, found in zip(ids, self._read_all([("HMGET", keys.group(i), *wanted) for i in ids]), strict=True):
            status, arrival, oldest, reward, tries, letters = found
            if status is None:  # it left meanwhile
                continue
            has_tokens = oldest is not None and int(oldest) != _NO_TOKENS and bool(letters.strip(b"p"))
            yield Record(
                uid=group_id,
                task=task,
                status=status.decode(),
                staleness=step - int(oldest) - 1 if has_tokens else 0,
                arrival=int(arrival),
                reward=float(reward) if reward is not None and b"c" in letters else None,
                tries=int(tries),
            )
