"""`Buffer`: the replay buffer as its users see it, one typed method for each thing that can happen to a group."""

from typing import Any

import orjson

from rollq.buffer.core import pairs, task_keys
from rollq.buffer.evaluations import Evaluations
from rollq.buffer.leasing import Leasing
from rollq.buffer.query.calls import Querying
from rollq.buffer.replies import Counts, Production
from rollq.buffer.rollouts import Status
from rollq.buffer.snapshots.restore import Restoring
from rollq.buffer.snapshots.save import Saving
from rollq.buffer.training import Training

SILENT_WORKER_MS = 30_000


class Buffer(Querying, Leasing, Training, Evaluations, Saving, Restoring):
    """The replay buffer of one run. Synchronous and thread-safe; asyncio code calls it from a few threads.

    >>> with Buffer.connect("redis://127.0.0.1:6379/0", "gsm8k") as buffer:
    ...     buffer.counts("math").ready
    """

    def counts(self, task: str) -> Counts:
        """Where a task stands, in one consistent read. Raises StoreLost."""
        server_ms, ready, outcomes, kept, clock, progress, *statuses = self._call_task("counts", task)
        return Counts(
            task=task,
            clock=self._decode_clock(task, dict(pairs(clock))),
            statuses={Status(name.decode()): count for name, count in pairs(statuses)},
            ready=ready,
            outcomes=outcomes,
            kept=kept,
            progress={name.decode(): _number(value) for name, value in pairs(progress)},
            server_ms=server_ms,
        )

    def take_production(self, task: str) -> Production:
        """What was produced since the last call of it. For people: after a lost reply these numbers are lost too."""
        now_ms, sums, timings = self._call_task("take_window", task)
        window = {name.decode(): _number(value) for name, value in pairs(sums)}
        since_ms = window.pop("since_ms", now_ms)
        return Production((now_ms - since_ms) / 1000, window, tuple(int(timing) for timing in timings))

    def last_error(self, task: str) -> str:
        """The error of the group that failed last; empty when none has failed."""
        newest = self._read(lambda: self.client.zrevrange(task_keys(self.run, task).status(Status.FAILED), 0, 0))
        return self.inspect(task, int(newest[0])).get("error", "") if newest else ""

    def inspect(self, task: str, group_id: int) -> dict[str, str]:
        """What is known of one group without its payload; empty when there is no such group."""
        found = self._call_task("inspect", task, group_id)
        return {name.decode(): value.decode() for name, value in pairs(found)}

    def workers(self) -> dict[str, dict[str, Any]]:
        """The last report of every worker that has spoken within half a minute, with `age_s`."""
        seconds, microseconds = self._read(lambda: self.client.time())
        now_ms = seconds * 1000 + microseconds // 1000
        reports: dict[str, dict[str, Any]] = {}
        for name, value in sorted(self._read(lambda: self.client.hgetall(self.keys.workers)).items()):
            at_ms, _, report = value.partition(b" ")
            age_ms = now_ms - int(at_ms)
            if age_ms <= SILENT_WORKER_MS:
                reports[name.decode()] = {**orjson.loads(report), "age_s": age_ms / 1000}
        return reports


def _number(value: bytes) -> float:
    return float(value) if b"." in value or b"e" in value else int(value)
