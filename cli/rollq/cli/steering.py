"""Pauses, resumes and drains tasks and workers."""

from collections.abc import Iterator, Sequence

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import Order
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.batch_sizes import is_retired
from rollq.buffer.rules.shards import shards_among

CONTROLS = {
    Order.PAUSE: (Control.PAUSE, "by hand"),
    Order.RUN: (Control.RUN, ""),
    Order.DRAIN: (Control.DONE, "drained by hand"),
}
"""The control that an order sets for a task's production, and the displayed reason."""


_ALREADY = {Order.RUN: "already runs", Order.PAUSE: "is already paused", Order.DRAIN: "has already ended"}


def why_not(control: Control, order: Order, *, named: bool) -> str:
    """Why an order changes nothing for a task in `control`, as in "it already runs"; empty if the order changes
    something. `named` says whether the order names the task."""
    if control is CONTROLS[order][0]:
        return _ALREADY[order]
    match order:
        case Order.PAUSE:
            stays = control in (Control.STOPPED, Control.DONE)
        case Order.RUN:
            stays = control is Control.DONE and not named
        case Order.DRAIN:
            stays = control is Control.STOPPED
    return f"stays {control.value}" if stays else ""


def way_back(task: str, control: Control, order: Order, *, is_retired: bool) -> str:
    """How to restart a task that is retired or has ended, if the order does not restart it; empty for other tasks."""
    if is_retired and order is Order.RUN:
        return f"it is retired, and `rollq set {task} batch_groups=N` brings it back"
    return f"`rollq resume --task {task}` begins production again" if control is Control.DONE else ""


def steer_tasks(buffer: Buffer, names: Sequence[str], order: Order) -> Iterator[str]:
    """Steer production of the named tasks, or of all; yields a line for each. Raises `ConfigError`."""
    tasks = buffer.tasks()
    chosen = [shard for name in names for shard in shards_of(buffer, tasks, name)]
    control, reason = CONTROLS[order]
    for task in chosen or tasks:
        clock = buffer.clock(task)
        before, rules = clock.control, clock.rules
        if before is Control.SLEEP:
            raise ConfigError(f"task {task!r} sleeps while the trainer uses the GPUs; the trainer will wake it")
        retired = is_retired(rules.batch_groups, rules.schedule, clock.step)
        if why := why_not(before, order, named=bool(names)):
            back = way_back(task, before, order, is_retired=retired)
            yield f"task {task}: {why}" + (f"; {back}" if back else "")
        else:
            buffer.set_control(task, control, reason)
            until = f"production has ended, until `rollq resume --task {task}`" if control is Control.DONE else ""
            note = until or way_back(task, control, order, is_retired=retired)
            yield f"task {task}: {before.value} -> {control.value}" + (f"; {note}" if note else "")


def _workers_named(name: str, workers: Sequence[str], run: str) -> list[str]:
    """The workers with this name, or started under it."""
    named = [worker for worker in workers if name in (worker, worker.rpartition("-")[0])]
    if not named:
        raise ConfigError(f"--worker {name!r}: run {run!r} has the workers {', '.join(workers) or 'none'}")
    return named


def steer_workers(buffer: Buffer, names: Sequence[str], order: Order) -> Iterator[str]:
    """Give an order to the workers with one of these names, or with such a [worker] name; yields a line for each.

    Raises `ConfigError` for a name that no worker has.
    """
    reports = list(buffer.workers())
    for name in names:
        for worker in _workers_named(name, reports, buffer.run):
            before = buffer.order_worker(worker, order)
            yield f"worker {worker}: {order.value}" + (", as before" if before is order else "")


def shards_of(buffer: Buffer, tasks: Sequence[str], name: str) -> list[str]:
    """The buffer's tasks that `name` means. Raises `ConfigError` when there is no such task."""
    shards = shards_among(tasks, name)
    if not shards:
        raise ConfigError(f"task {name!r}: run {buffer.run!r} has the tasks {', '.join(tasks)}")
    return shards
