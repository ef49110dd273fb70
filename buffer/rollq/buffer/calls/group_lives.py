"""The times of claimed groups, for traces."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.store.keys import task_keys


class GroupLife(NamedTuple):
    """When a group was admitted, put and claimed, in server ms since 1970, with its response tokens, mean reward and
    oldest version (see `rollq.buffer.values.rollouts.Group`)."""

    task: str
    group_id: int
    admitted_ms: int
    put_ms: int
    claimed_ms: int
    attempt: int
    tokens: int
    reward: float
    oldest_version: int


class Living(BufferCore):
    """The call that reads how groups spent their time."""

    def lives(self, step: int, groups: Sequence[tuple[str, int]]) -> list[GroupLife]:
        """These groups' lives, in the given order, from a claimed step; groups that are gone are left out."""
        tasks = list(dict.fromkeys(task for task, _ in groups))
        names = ("admitted_ms", "put_ms", "attempt", "tokens", "reward", "oldest")
        claims = [("HGET", task_keys(self.run, task).manifest(step), "claimed_ms") for task in tasks]
        reads = [("HMGET", task_keys(self.run, task).group(group_id), *names) for task, group_id in groups]
        replies = self.send_all([*claims, *reads])
        claimed_ms = dict(zip(tasks, replies, strict=False))
        return [
            _life(task, group_id, claimed, fields)
            for (task, group_id), fields in zip(groups, replies[len(tasks) :], strict=True)
            if fields[1] and (claimed := claimed_ms[task])
        ]  # fmt: skip


def _life(task: str, group_id: int, claimed: bytes, fields: Any) -> GroupLife:
    admitted, put, attempt, tokens, reward, oldest = fields
    times = int(admitted), int(put), int(claimed)
    return GroupLife(task, group_id, *times, int(attempt or 0), int(tokens or 0), float(reward or 0), int(oldest))
