"""A trainer's values for a group's tokens. Pages wait for them briefly, or show why they are missing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollq.buffer.archive.annotations import Annotation, Annotations, Values
from rollq.buffer.calls.group_details import FoundGroup
from rollq.monitor.dashboard.own_thread import WAIT_S, NotYet, OwnThread
from rollq.monitor.groups.view import SegmentView


class Reader(Protocol):
    """Reads annotations, in one thread."""

    def of_group(self, task: str, group_id: int, step: int) -> Annotations:
        """Annotations of a group that was trained at a step; empty if there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Trained:
    """A trainer's values for a group's tokens. `note` says why there are no values, or is ""."""

    annotations: Annotations = field(default_factory=dict)
    note: str = ""


class TrainedReader:
    """Annotations for a page, read by a separate thread, so a hanging archive blocks nothing else."""

    def __init__(self, open_reader: Callable[[], Reader | str], *, wait_s: float = WAIT_S) -> None:
        """`open_reader` returns a reader, or why there is none. The thread calls it until it succeeds."""
        self._open = open_reader
        self._reader: Reader | None = None
        self._thread = OwnThread("annotations", wait_s)

    def of(self, group: FoundGroup) -> Trained:
        """The annotations of a group."""
        if (step := trained_step(group)) is None:
            return Trained(note="The trainer has not trained this group, and has no logprobs for its tokens.")
        try:
            return self._thread.call(lambda: self._read(group, step))
        except NotYet:
            wait_s = self._thread.wait_s
            return Trained(note=f"The archive does not answer within {wait_s:g} s: open this group again later.")

    def _read(self, group: FoundGroup, step: int) -> Trained:
        try:
            if self._reader is None:
                opened = self._open()
                if isinstance(opened, str):
                    return Trained(note=opened)
                self._reader = opened
            annotations = self._reader.of_group(group.task, group.group_id, step)
        except Exception as error:  # noqa: BLE001  (a file system, a bucket or a damaged file may raise anything)
            return Trained(note=f"The trainer's values of these tokens cannot be read: {error}")
        if not annotations:
            return Trained(note=f"The archive has no trainer's values of this group at step {step}.")
        return Trained(annotations)


def trained_step(group: FoundGroup) -> int | None:
    """The train step whose batch has or had the group; None if no trainer took it."""
    if group.batch is not None:
        return group.batch.step
    step = group.fields.get("trained_step")
    return int(step) if step and group.fields.get("left") == "trained" else None


def values_of(segment: SegmentView, annotation: Annotation | None) -> Mapping[str, Values]:
    """A segment's columns, with an item for each token. The trainer's logprob is computed from the mismatch, or vice
    versa: the mismatch is the trainer's logprob minus the worker's, in nats. Pure."""
    if annotation is None:
        return {}
    named = _whole_columns(annotation.values, len(segment.ids))
    logprob, mismatch = named.pop("logprob", None), named.pop("mismatch", None)
    added = {
        "mismatch": _sums(logprob, segment.logprobs, -1) if mismatch is None else mismatch,
        "trainer logprob": _sums(mismatch, segment.logprobs, 1) if logprob is None else logprob,
    }
    return _whole_columns(added, len(segment.ids)) | named


def _whole_columns(columns: Mapping[str, Values | None], tokens: int) -> dict[str, Values]:
    """The columns with an item for each token."""
    return {name: column for name, column in columns.items() if column is not None and len(column) == tokens}


def _sums(ones: Values | None, others: Values, sign: int) -> list[float | None] | None:
    """`one + sign * other` for each pair, None where either is None; None without `ones`."""
    if ones is None:
        return None
    pairs = zip(ones, others, strict=True)
    return [None if first is None or other is None else first + sign * other for first, other in pairs]
