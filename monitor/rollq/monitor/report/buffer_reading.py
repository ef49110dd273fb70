"""Takes a `BufferReading` of a run through the buffer's read-only calls."""

import time
from collections.abc import Iterable, Mapping

from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.shards import Number, add_up, task_of
from rollq.monitor.report.records import BufferReading


def take_reading(buffer: MonitorBuffer) -> BufferReading:
    """Read the present depths, counters, workers and live version of a run. Adds up a task's shards."""
    counts = [buffer.counts(name) for name in buffer.tasks()]
    live = buffer.live_model()
    return BufferReading(
        time_s=time.time(),
        depths=_by_task((count.task, {status.value: n for status, n in count.statuses.items()}) for count in counts),
        progress=_by_task((count.task, count.progress) for count in counts),
        workers=buffer.workers(),
        version=live.version if live else -1,
    )


def _by_task(counted: Iterable[tuple[str, Mapping[str, Number]]]) -> dict[str, dict[str, Number]]:
    shards: dict[str, list[Mapping[str, Number]]] = {}
    for name, numbers in counted:
        shards.setdefault(task_of(name), []).append(numbers)
    return {task: add_up(numbers) for task, numbers in shards.items()}
