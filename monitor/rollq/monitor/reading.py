"""Takes a `BufferReading` of a run through the buffer's read-only calls."""

import time

from rollq.buffer.roles import MonitorBuffer
from rollq.monitor.records import BufferReading


def take_reading(buffer: MonitorBuffer) -> BufferReading:
    """Depths, counters, workers and live version as they are now."""
    counts = [buffer.counts(task) for task in buffer.tasks()]
    live = buffer.live_model()
    return BufferReading(
        time_s=time.time(),
        depths={c.task: {status.value: n for status, n in c.statuses.items()} for c in counts},
        progress={c.task: dict(c.progress) for c in counts},
        workers=buffer.workers(),
        version=live.version if live else -1,
    )
