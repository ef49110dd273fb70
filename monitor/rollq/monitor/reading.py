"""Takes a `BufferReading` of a run through the buffer's read-only calls."""

import time

from rollq.buffer.roles import MonitorBuffer
from rollq.monitor.records import BufferReading


def take_reading(buffer: MonitorBuffer) -> BufferReading:
    """Read the present depths, counters, workers and live version of a run."""
    counts = [buffer.counts(task) for task in buffer.tasks()]
    live = buffer.live_model()
    return BufferReading(
        time_s=time.time(),
        depths={count.task: {status.value: n for status, n in count.statuses.items()} for count in counts},
        progress={count.task: dict(count.progress) for count in counts},
        workers=buffer.workers(),
        version=live.version if live else -1,
    )
