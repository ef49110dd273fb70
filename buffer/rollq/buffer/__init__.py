"""The replay buffer: groups stored in Redis, and every move that a group can make. It is independent of roles.

A group has exactly one status. Each move is one atomic call to a Redis function, whose name labels it here.

admit, fill_batch
       |
       v    lease            put             claim            commit              checkpoint
    pending ----> running ---------> completed ----> claimed ---------> archived -----------> (gone)
     ^   ^         | | |              ^ ^   |  ^        |                   |
     |   +---------+ | |              | |   |  +release-+                   | commit, for a copy of a group
     |   hand_back,  | |              | |   |                               | that may be used again
     |   reap        | |              | |   |                               v
     |               | |              | +---|------------commit--------- cooling
     |               | +-put-> gathered     |                               |
     |               |    end_finalize      | expire                        | commit, when too stale
     |               |                      v                               v
     |               |                   expired                          (gone)
     |               |                    |  ^
     +-----recycle---|--------------------+  | expire
     |               +-put-> aborted --------+
     +-----recycle---|---------+
                     +-put-> filtered, failed

Other moves of these functions, and moves of functions that are not in the picture:

insert              new -> completed, for finished groups of a task that is offline
put                 running -> expired, or gone, when the result is too stale; -> pending when its batch still needs it
hand_back, reap     running -> failed when the tries are spent or the group is quarantined
hand_back           running -> aborted when the group's batch is cut off
expire              completed, aborted -> expired, or gone where the task drops what expires
release             claimed -> failed when a group is quarantined, or gone when it is dropped
commit              claimed -> gone where the run keeps no batches for a resume
end_finalize        gathered -> filtered, expired; pending, running -> aborted, for groups that are not finished
cut_off             pending -> aborted, for groups of a batch that is trained
abort_batch         gathered -> completed for groups that are kept; pending, running, gathered -> gone;
                    aborted -> gone for groups that left the batch when it was cut off
close_evaluation    any status -> gone
task_begin_epoch    claimed -> archived, for steps that the trainer's checkpoint covers
order_group         completed, filtered, failed -> pending; running, completed -> failed; or gone: by hand
rewind              archived -> claimed (replay); claimed, archived -> completed (return) or pending (regenerate)

Gathered groups wait for the rest of a coordinator's batch, or belong to an evaluation. A task's counters record why
each group left, so none is lost unnoticed.
"""

from typing import TYPE_CHECKING

from rollq.buffer.common.lazy import lazy_exports

__all__ = [
    "Buffer",
    "FinishReason",
    "FinishedGroup",
    "Group",
    "ImageRef",
    "Prompt",
    "Sample",
    "SampleStatus",
    "Segment",
    "Status",
    "VersionSpan",
    "absent_logprobs",
    "load_array",
    "open_queue",
    "store_array",
    "task_of",
    "unversioned",
]

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.rules.shards import task_of
    from rollq.buffer.tickets import open_queue
    from rollq.buffer.values.rollouts import (
        FinishedGroup,
        FinishReason,
        Group,
        ImageRef,
        Prompt,
        Sample,
        SampleStatus,
        Segment,
        Status,
        VersionSpan,
        absent_logprobs,
        unversioned,
    )
    from rollq.buffer.wire.arrays import load_array, store_array
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "rollq.buffer.buffer": "Buffer",
            "rollq.buffer.values.rollouts": (
                "FinishReason FinishedGroup Group ImageRef Prompt Sample SampleStatus Segment Status VersionSpan "
                "absent_logprobs unversioned"
            ),
            "rollq.buffer.rules.shards": "task_of",
            "rollq.buffer.tickets": "open_queue",
            "rollq.buffer.wire.arrays": "load_array store_array",
        },
    )
