"""Pause, resume and drain, of tasks and of workers."""

from collections.abc import Iterator, Sequence

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.replies import Control
from rollq.buffer.shards import shards_among
from rollq.buffer.steering import Order

CONTROLS = {
    Order.PAUSE: (Control.PAUSE, "by hand"),
    Order.RUN: (Control.RUN, ""),
    Order.DRAIN: (Control.DONE, "drained by hand"),
}
"""The control that an order sets production of a task to, and the reason that is shown."""


def stays(control: Control, order: Order, *, named: bool) -> bool:
    """Whether a task in `control` stays as it is. `named`: the order names the task, instead of meaning all."""
    match order:
        case Order.PAUSE:
            return control in (Control.STOPPED, Control.DONE)
        case Order.RUN:
            return control is Control.DONE and not named
        case Order.DRAIN:
            return control is Control.STOPPED


def steer_tasks(buffer: Buffer, names: Sequence[str], order: Order) -> Iterator[str]:
    """Steer production of the named tasks, or of all; yields a line for each. Raises `ConfigError`."""
    tasks = buffer.tasks()
    chosen = [shard for name in names for shard in shards_of(buffer, tasks, name)]
    control, reason = CONTROLS[order]
    for task in chosen or tasks:
        before = buffer.clock(task).control
        if before is Control.SLEEP:
            raise ConfigError(f"task {task!r} sleeps while the trainer uses the GPUs; the trainer will wake it")
        if stays(before, order, named=bool(names)):
            again = f"; `rollq resume --task {task}` begins production again" if before is Control.DONE else ""
            yield f"task {task}: stays {before.value}{again}"
        else:
            buffer.set_control(task, control, reason)
            ends = f"; production has ended, until `rollq resume --task {task}`" if control is Control.DONE else ""
            yield f"task {task}: {before.value} -> {control.value}{ends}"


def steer_workers(buffer: Buffer, names: Sequence[str], order: Order) -> Iterator[str]:
    """Give an order to the workers that are called, or whose [worker] name is, one of `names`; yields a line for each.

    Raises `ConfigError` for a name that no worker has.
    """
    reports = buffer.workers()
    for name in names:
        if not (found := [worker for worker in reports if name in (worker, worker.rpartition("-")[0])]):
            raise ConfigError(f"--worker {name!r}: run {buffer.run!r} has the workers {', '.join(reports) or 'none'}")
        for worker in found:
            buffer.order_worker(worker, order)
            yield f"worker {worker}: {order.value}"


def shards_of(buffer: Buffer, tasks: Sequence[str], name: str) -> list[str]:
    """The tasks of the buffer that `name` means. Raises `ConfigError` when there is none."""
    found = shards_among(tasks, name)
    if not found:
        raise ConfigError(f"task {name!r}: run {buffer.run!r} has the tasks {', '.join(tasks)}")
    return found
