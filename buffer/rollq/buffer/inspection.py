"""Read-only calls for monitoring and diagnosis."""

from typing import Any

import orjson

from rollq.buffer.core import BufferCore, number, pairs
from rollq.buffer.replies import Counts
from rollq.buffer.rollouts import Status
from rollq.buffer.store.keys import task_keys

SILENT_WORKER_S = 30.0


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
        newest = self.send("ZREVRANGE", task_keys(self.run, task).status(Status.FAILED), 0, 0)
        return self.inspect(task, int(newest[0])).get("error", "") if newest else ""

    def inspect(self, task: str, group_id: int) -> dict[str, str]:
        """The stored fields of one group, without its payload; empty for a group that is not in the buffer."""
        found = self.call_task("inspect", task, group_id)
        return {name.decode(): value.decode() for name, value in pairs(found)}

    def workers(self) -> dict[str, dict[str, Any]]:
        """The last report of every worker that has reported within the last half minute, with its `age_s`."""
        now_ms = self.server_ms()
        reports: dict[str, dict[str, Any]] = {}
        for name, value in sorted(self.send("HGETALL", self.keys.workers).items()):
            age_s, report = _decode_report(value, now_ms)
            if abs(age_s) <= SILENT_WORKER_S:  # the server's clock may have been set back
                reports[name.decode()] = report
        return reports

    def trainer(self) -> dict[str, Any] | None:
        """The trainer's last report, with its `age_s`; None before the first one."""
        report = self.send("HGET", self.keys.trainer, "report")
        return None if report is None else _decode_report(report, self.server_ms())[1]


def _decode_report(raw: bytes, now_ms: int) -> tuple[float, dict[str, Any]]:
    """The age of a report in seconds, and the report with its `age_s`, which is never negative."""
    at_ms, _, report = raw.partition(b" ")
    age_s = (now_ms - int(at_ms)) / 1000
    return age_s, {**orjson.loads(report), "age_s": max(age_s, 0.0)}
