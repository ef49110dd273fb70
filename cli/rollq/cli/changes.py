"""Describes the effect of an order before it is given. Pure."""

from dataclasses import dataclass

from rollq.buffer.calls.orders import Order
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.rollouts import Status
from rollq.cli.steering import CONTROLS, way_back, why_not
from rollq.monitor.status.read import RunStatus
from rollq.monitor.text.units import count

VERBS = {Order.PAUSE: "Pause", Order.RUN: "Resume", Order.DRAIN: "Drain"}


@dataclass(frozen=True, slots=True)
class Change:
    """An order to a task or to a worker. `text` describes the order's effect, and `is_possible` says whether it has
    any."""

    order: Order
    kind: str  # task or worker
    name: str
    text: str
    is_possible: bool = True

    @property
    def title(self) -> str:
        """The question to confirm."""
        return f"{VERBS[self.order]} {self.kind} {self.name}?"


def names_of(run: RunStatus, kind: str) -> list[str]:
    """The names of the run's tasks or workers; none for another kind."""
    return {"task": [task.task for task in run.tasks], "worker": list(run.workers)}.get(kind, [])


def change_of(run: RunStatus, order: Order, kind: str, name: str) -> Change:
    """The change that an order would make to the selected task or worker."""
    return _of_task(run, order, name) if kind == "task" else _of_worker(run, order, name)


def _of_task(run: RunStatus, order: Order, name: str) -> Change:
    task = next(task for task in run.tasks if task.task == name)
    before, (after, _) = Control(task.control), CONTROLS[order]
    running, pending = task.groups(Status.RUNNING), task.groups(Status.PENDING)
    if before is Control.SLEEP:
        return Change(order, "task", name, "It sleeps while the trainer uses the GPUs; the trainer wakes it.", False)
    if why := why_not(before, order, named=True):
        back = way_back(name, before, order, is_retired=task.is_retired)
        return Change(order, "task", name, f"Nothing changes: it {why}{f'; {back}' if back else ''}.", False)
    effect = {
        Order.PAUSE: (
            f"Nothing new is admitted or leased: {count(pending, 'pending group')} wait. "
            f"{count(running, 'running group')} finish, or are interrupted, as [worker] pause says."
        ),
        Order.RUN: "Prompts are admitted and groups are leased again.",
        Order.DRAIN: (
            f"Nothing new is admitted. {count(pending + running, 'group')} on the way to the trainer still finish. A "
            "trainer ends when no further batch can fill."
        ),
    }[order]
    return Change(order, "task", name, f"{before.value} -> {after.value}. {effect}")


def _of_worker(run: RunStatus, order: Order, name: str) -> Change:
    report = run.workers[name]
    held = count(int(report.get("in_flight") or 0), "group")
    effect = {
        Order.PAUSE: f"It leases nothing more. The {held} that it holds finish, or are interrupted.",
        Order.RUN: "It leases groups again.",
        Order.DRAIN: (
            f"It leases nothing more, and stops once the {held} that it holds have ended, or after [worker] grace_s. "
            "After that it cannot be resumed, only restarted."
        ),
    }[order]
    if report["condition"] != "alive":
        effect += f" It is {report['condition']}: it follows once it reports again."
    return Change(order, "worker", name, effect)
