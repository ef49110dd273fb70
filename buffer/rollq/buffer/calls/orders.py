"""The operator's orders to single workers and for single groups."""

import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status

_ORDER_MOVED = -1
"""The reply of the function when a worker has got another order since its caller read it."""


class Order(StrEnum):
    """The order that one worker has."""

    RUN = "run"
    PAUSE = "pause"  # lease nothing more
    DRAIN = "drain"  # lease nothing more, and stop when what is held has ended


@dataclass(frozen=True, slots=True)
class Fleet:
    """The places and the speed of all workers that take groups.

    `measured_places`: samples that workers with a known speed can generate at a time, `tokens_per_s` in all.
    `new_places`: samples that the other workers can generate at a time. `load`: the sum of the samples that each worker
    has in flight on average. `open`: the samples that they have to generate now.
    """

    workers: int = 0
    measured_places: int = 0
    tokens_per_s: int = 0
    new_places: int = 0
    load: int = 0
    open: int = 0

    @property
    def mean_load(self) -> float:
        """How many samples a worker has in flight on average; 0.0 without a worker."""
        return self.load / self.workers if self.workers else 0.0


class GroupOrder(StrEnum):
    """An order for one group."""

    REQUEUE = "requeue"  # throw its samples away, and have it sampled again
    QUARANTINE = "quarantine"  # no trainer gets it, and its samples are kept: it fails
    DROP = "drop"  # it leaves the buffer, and is counted


class Refusal(StrEnum):
    """Why an order for a group changes nothing."""

    GONE = "gone"  # the group is not in the buffer
    STATUS = "status"  # a group with its status cannot be moved so
    MOVED = "moved"  # it has another status than the caller saw
    BATCH = "batch"  # its batch or evaluation has not ended, and ends with all of its groups
    UNSAMPLED = "unsampled"  # nobody would sample it again: its task is offline, or its evaluation has ended
    SAVING = "saving"  # while the buffer is saved, nothing leaves it
    ORDERED = "ordered"  # somebody else has given an order for it at the same time


class Ordered(NamedTuple):
    """The outcome of an order for a group. `status`: the one that it had, None for a group that is gone; `refusal`:
    None where the order was carried out, or would be."""

    status: Status | None
    refusal: Refusal | None


class Steering(BufferCore):
    """Calls that steer single workers, and move single groups."""

    def order_worker(self, worker: str, order: Order) -> Order:
        """Give an order to the worker that reports as `worker`, which follows within a second or two; returns the one
        that it had."""
        moved, seen = True, b""
        while moved:
            seen = self.send("HGET", self.keys.orders, worker) or b""
            moved = self.call("order_worker", self.keys.info, self.incarnation, worker, order, seen) == _ORDER_MOVED
        return Order(seen.split()[-1].decode()) if seen else Order.RUN

    def order_group(
        self, task: str, group_id: int, order: GroupOrder, *, dry_run: bool = False, expected: Status | None = None
    ) -> Ordered:
        """Move a group as `order` says; with `dry_run`, only find out whether it would be moved. With `expected`, a
        group with another status is left.

        The lease of a running group ends: what its worker puts later is refused. Raises `StoreLost`.
        """
        seen = self.send("HGET", task_keys(self.run, task).group(group_id), "ordered") or b""
        mark = secrets.token_hex(8)
        word, status = self.call_task("order_group", task, group_id, order, int(dry_run), seen, mark, expected or "")
        outcome = word.decode()
        return Ordered(Status(status.decode()) if status else None, None if outcome == "done" else Refusal(outcome))
