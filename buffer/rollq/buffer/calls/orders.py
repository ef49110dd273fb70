"""The operator's orders to single workers and for single groups."""

import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status

_ORDER_MOVED = -1
"""The function's reply if a worker got another order after its caller read it."""


class Order(StrEnum):
    """The current order of a worker."""

    RUN = "run"
    PAUSE = "pause"  # lease nothing more
    DRAIN = "drain"  # lease nothing more, and stop once the held groups have ended


@dataclass(frozen=True, slots=True)
class Fleet:
    """The capacity and speed of all workers that take groups.

    `measured_places` is the number of samples that workers with a known speed can generate at once, at a total of
    `tokens_per_s`. `new_places` is the number that the other workers can generate at once. `load` sums the workers'
    average numbers of samples in flight. `open` is the number of samples that all workers have to generate now.
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

    REQUEUE = "requeue"  # discard its samples and sample it again
    QUARANTINE = "quarantine"  # keep it from trainers: it fails, and keeps its samples
    DROP = "drop"  # remove it from the buffer, counted


class Refusal(StrEnum):
    """The reason why an order for a group changes nothing."""

    GONE = "gone"  # the group is not in the buffer
    STATUS = "status"  # its status does not allow this move
    MOVED = "moved"  # its status changed after the caller saw it
    BATCH = "batch"  # its batch or evaluation is running, and must end with all its groups
    UNSAMPLED = "unsampled"  # nobody would sample it again: its task is offline, or its evaluation has ended
    SAVING = "saving"  # nothing leaves the buffer while it is being saved
    ORDERED = "ordered"  # someone else moved it at the same time


class Ordered(NamedTuple):
    """The outcome of an order for a group. `status` is the group's previous status, None if the group is gone.
    `refusal` is None if the order was carried out, or would be."""

    status: Status | None
    refusal: Refusal | None


class Steering(BufferCore):
    """Calls that steer single workers and move single groups."""

    def order_worker(self, worker: str, order: Order) -> Order:
        """Give an order to the worker that reports as `worker`, which follows within two seconds. Returns the previous
        order."""
        moved, seen = True, b""
        while moved:
            seen = self.send("HGET", self.keys.orders, worker) or b""
            moved = self.call("order_worker", self.keys.info, self.incarnation, worker, order, seen) == _ORDER_MOVED
        return Order(seen.split()[-1].decode()) if seen else Order.RUN

    def order_group(
        self, task: str, group_id: int, order: GroupOrder, *, dry_run: bool = False, expected: Status | None = None
    ) -> Ordered:
        """Carry out `order` on a group; with `dry_run`, only check whether the group would move. With `expected`, leave
        a group with any other status alone.

        The lease of a running group ends, so later results from its worker are refused. Raises `StoreLost`.
        """
        seen = self.send("HGET", task_keys(self.run, task).group(group_id), "ordered") or b""
        mark = secrets.token_hex(8)
        word, status = self.call_task("order_group", task, group_id, order, int(dry_run), seen, mark, expected or "")
        outcome = word.decode()
        return Ordered(Status(status.decode()) if status else None, None if outcome == "done" else Refusal(outcome))
