"""Read-only calls for monitoring and diagnosis."""

from typing import Any

import orjson

from rollq.buffer.core import BufferCore, number, pairs
from rollq.buffer.replies import Counts
from rollq.buffer.rollouts import Status
from rollq.buffer.store.keys import task_keys

SILENT_WORKER_MS = 30_000


class Inspection(BufferCore):
    """Read-only calls for monitors."""

    def counts(self, task: str) -> Counts:
        """The counts and clock of a task, in one consistent read. Raises `StoreLost`."""
        server_ms, ready, outcomes, kept, clock, progress, *statuses = self.call_task("counts", task)
        return Counts(
            task=task,
            clock=self._decode_clock(task, dict(pairs(clock))),
            statuses={Status(name.decode()): count for name, count in pairs(statuses)},
            ready=ready,
            outcomes=outcomes,
            kept=kept,
            progress={name.decode(): number(value) for name, value in pairs(progress)},
            server_ms=server_ms,
        )

    def last_error(self, task: str) -> str:
        """The error of the group that arrived last among the failed ones; empty when none has failed."""
        newest = self.send(lambda: self.client.zrevrange(task_keys(self.run, task).status(Status.FAILED), 0, 0))
        return self.inspect(task, int(newest[0])).get("error", "") if newest else ""

    def inspect(self, task: str, group_id: int) -> dict[str, str]:
        """The stored fields of one group, without its payload; empty for a group that is not in the buffer."""
        found = self.call_task("inspect", task, group_id)
        return {name.decode(): value.decode() for name, value in pairs(found)}

    def workers(self) -> dict[str, dict[str, Any]]:
        """The last report of every worker that has reported within the last half minute, with its `age_s`."""
        now_ms = self.server_ms()
        reports: dict[str, dict[str, Any]] = {}
        for name, value in sorted(self.send(lambda: self.client.hgetall(self.keys.workers)).items()):
            at_ms, _, report = value.partition(b" ")
            age_ms = now_ms - int(at_ms)
            if abs(age_ms) <= SILENT_WORKER_MS:  # the server's clock may have been set back
                reports[name.decode()] = {**orjson.loads(report), "age_s": max(age_ms, 0) / 1000}
        return reports
