"""`Buffer`: the public replay buffer, with one typed method for each thing that can happen to a group."""

from rollq.buffer.calls.exclusion import Excluding
from rollq.buffer.calls.insertion import Insertion
from rollq.buffer.calls.runs import Deletion
from rollq.buffer.roles import (
    ArchiverBuffer,
    CoordinatorBuffer,
    MonitorBuffer,
    ProducerBuffer,
    TrainerBuffer,
    WorkerBuffer,
)
from rollq.buffer.snapshots.restore import Restoring
from rollq.buffer.snapshots.save import Saving


class Buffer(
    WorkerBuffer,
    CoordinatorBuffer,
    ProducerBuffer,
    TrainerBuffer,
    MonitorBuffer,
    ArchiverBuffer,
    Insertion,
    Excluding,
    Saving,
    Restoring,
    Deletion,
):
    """The replay buffer of one run. Synchronous and thread-safe; asyncio code calls it from a few threads.

    It has every role's methods. Annotate code for one role with that role's class in `rollq.buffer.roles`, so that mypy
    rejects calls that the role may not make.

    >>> with Buffer.connect("redis://127.0.0.1:6379/0", "gsm8k") as buffer:
    ...     buffer.counts("math").ready
    """
