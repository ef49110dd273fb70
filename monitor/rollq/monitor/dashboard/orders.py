"""The changes that the page offers, as text, and the protocol that makes them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rollq.buffer.calls.orders import GroupOrder, Order, Ordered, Refusal
from rollq.buffer.values.rollouts import Status
from rollq.monitor.status.read import RunStatus


@dataclass(frozen=True, slots=True)
class Preview:
    """A preview of a change: a question and the effects. `is_possible` says whether anything would change."""

    title: str
    text: str
    is_possible: bool


class Steering(Protocol):
    """Pauses, resumes and drains, and moves single groups. `kind` is run, task or worker, and `name` is "" for the
    run."""

    def preview(self, run: RunStatus, order: Order, kind: str, name: str) -> Preview:
        """The change that an order would make. Raises `ConfigError` for an unknown name."""
        ...

    def make(self, order: Order, kind: str, name: str) -> list[str]:
        """Give the order. Returns a line per change. Raises `RollqError`."""
        ...

    def order_group(self, task: str, group_id: int, order: GroupOrder, *, dry_run: bool) -> Ordered:
        """Move a group or, with `dry_run`, find out whether it would be moved. Raises `RollqError`."""
        ...


def preview_of_group(task: str, group_id: int, order: GroupOrder, ordered: Ordered) -> Preview:
    """The change that an order for a group would make, according to a dry run. Pure."""
    title = f"{order.value.capitalize()} {task} {group_id}?"
    return Preview(title, change_of_group(order, ordered), ordered.refusal is None)


def change_of_group(order: GroupOrder, ordered: Ordered) -> str:
    """The effect of an order for a group, or why there is none. Pure."""
    status = ordered.status
    if ordered.refusal is not None or status is None:
        why = "it has left the buffer" if status is None else f"it is {status.value}: {_WHY_NOT[status]}"
        return f"Nothing changes: {_REFUSALS.get(ordered.refusal, why)}."
    lease = " Its lease ends: later results of its worker are refused." if status is Status.RUNNING else ""
    return f"{status.value} -> {_EFFECTS[order]}{lease}"


_EFFECTS: Mapping[GroupOrder, str] = {
    GroupOrder.REQUEUE: "pending. Its samples are discarded, and a worker samples its prompt again.",
    GroupOrder.QUARANTINE: (
        "failed. No trainer gets it. It is kept for inspection like other failed groups: the newest audit_groups of "
        "its task. Requeue releases it, unless its task is offline."
    ),
    GroupOrder.DROP: "gone. It leaves the buffer with its samples, and is counted as dropped by hand.",
}
_REFUSALS: Mapping[Refusal | None, str] = {
    Refusal.MOVED: "its status has changed in the meantime",
    Refusal.BATCH: "its batch or evaluation has not ended, and decides about it",
    Refusal.UNSAMPLED: "no worker would sample it again, because its task is offline or its evaluation has ended",
    Refusal.SAVING: "the buffer is being saved, and nothing leaves it until that ends; try again in a minute",
    Refusal.ORDERED: "someone else has just moved it; check it again",
}
_WHY_NOT: Mapping[Status, str] = {
    Status.PENDING: "it has nothing to keep, and a worker samples it anyway",
    Status.RUNNING: "a worker is sampling it now",
    Status.COMPLETED: "the trainer may take it",
    Status.GATHERED: "it belongs to its batch or evaluation",
    Status.COOLING: "it is a copy that waits to be trained again",
    Status.ABORTED: "a worker continues it anyway",
    Status.EXPIRED: "a worker samples it again anyway",
    Status.FILTERED: "no trainer gets it anyway",
    Status.FAILED: "no trainer gets it in this status",
    Status.CLAIMED: "the trainer has it in its batch",
    Status.ARCHIVED: "it was trained, and waits for a checkpoint",
    Status.LEAVING: "it waits for the archive",
}
"""A group's status -> why it refuses an order."""
