"""The replay buffer: groups at rest in Redis, and every move that a group can make. The ground floor: knows no role.

         admit            lease              put
dataset ----> pending ----------> running -------------> completed --claim--> claimed --commit--> archived
               ^   ^               | | |                   ^  | ^               | |                |   |
               |   |  reap,        | | +--put-> filtered   |  | +----release----+ +-release(drop)  |   | checkpoint
               |   +--hand_back----+ +----put-> failed     |  | expire        begin_epoch(replay)  |   v
               |                     +----put-> aborted    |  v               claimed <------------+ (trained)
               |                                 |         | expired          completed <----------+
               +-------------recycle-------------+---------+--+                      begin_epoch(return)

A group is in exactly one status set. Edges are named by the function that makes the move; each is one atomic call.
"""

from typing import TYPE_CHECKING

from rollq.buffer.lazy import lazy_exports

__all__ = [
    "Buffer",
    "FinishReason",
    "Group",
    "Prompt",
    "Sample",
    "SampleStatus",
    "Segment",
    "Status",
    "VersionSpan",
    "load_array",
    "open_queue",
    "store_array",
]

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.rollouts import FinishReason, Group, Prompt, Sample, SampleStatus, Segment, Status, VersionSpan
    from rollq.buffer.tickets import open_queue
    from rollq.buffer.wire.arrays import load_array, store_array
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "rollq.buffer.buffer": "Buffer",
            "rollq.buffer.rollouts": ("FinishReason Group Prompt Sample SampleStatus Segment Status VersionSpan"),
            "rollq.buffer.tickets": "open_queue",
            "rollq.buffer.wire.arrays": "load_array store_array",
        },
    )
