"""Removes external payloads that their group has dropped or that no group ever named."""

import math
from collections.abc import Iterator, Sequence

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.common.portions import slices
from rollq.buffer.payloads.interface import PayloadName

NAMES_PER_CALL = 200
AUDIT_PAUSE_S = 60.0
"""Seconds between two audit passes: more than a primary needs to notice that it is cut off."""


class Collecting(BufferCore):
    """Calls that remove payloads. They may run at any time, in any number of processes."""

    def collect(self, task: str) -> int:
        """Remove the payloads that a task's groups have dropped; returns how many payloads."""
        total, more = 0, bool(self.payloads)
        while more:
            garbage = [name.decode() for name in self.call_task("find_garbage", task, NAMES_PER_CALL)]
            if garbage:
                self.payloads.remove([name for text in garbage if (name := PayloadName.parse(task, text))])
                self.call_task("forget_garbage", task, *garbage)
            total += len(garbage)
            more = len(garbage) == NAMES_PER_CALL
        return total

    def find_orphans(self, names: Sequence[PayloadName]) -> set[PayloadName]:
        """The orphans among these payloads of the run: no group names them, and no lease may still put them."""
        orphans = set[PayloadName]()
        for task in {name.task for name in names}.intersection(self.tasks()):
            of_task = {name.encoded: name for name in names if name.task == task}
            for some in slices(list(of_task), NAMES_PER_CALL):
                unnamed = self.call_task("find_orphans", task, *some)
                orphans |= {of_task[text.decode()] for text in unnamed}
        return orphans


class Audit:
    """Removes orphans, such as payloads from workers that died before putting the group.

    A payload is removed once two passes have found it: the first pass may have asked a primary that was cut off from
    its cluster and missed later leases.
    """

    def __init__(self, buffer: Collecting) -> None:
        self._buffer = buffer
        self._pages: Iterator[list[PayloadName]] | None = None
        self._due_s = -math.inf
        self._suspects = set[PayloadName]()  # orphans found by the last pass
        self._found = set[PayloadName]()  # orphans found by this pass

    @property
    def is_at_work(self) -> bool:
        """Whether a pass is under way."""
        return self._pages is not None

    def step(self, now_s: float) -> int:
        """Check some payloads, or none between two passes. Returns how many were removed."""
        if self._pages is None:
            if now_s < self._due_s or not self._buffer.payloads:
                return 0
            self._pages = self._buffer.payloads.pages()
        page = next(self._pages, None)
        if page is None:
            self._pages, self._suspects, self._found = None, self._found, set()
            self._due_s = now_s + AUDIT_PAUSE_S
            return 0
        orphans = self._buffer.find_orphans(page)
        gone = orphans & self._suspects
        self._buffer.payloads.remove(list(gone))
        self._found |= orphans - gone
        return len(gone)
