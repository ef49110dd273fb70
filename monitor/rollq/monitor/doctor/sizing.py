"""The most memory that a run takes, by the formula in docs/guide/operations.md. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rollq.buffer.rules.batch_sizes import groups_at
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.values.rollouts import MOST_PART_BYTES
from rollq.buffer.wire.group_fields import is_large

PAYLOAD_FACTOR = 1.25
"""Allocators round large values up to size classes, by at most a quarter."""
PARTS_FACTOR = 1.5
"""The ratio of tokens' size in encoded parts of 128, each with lengths, versions and sampling parameters, to their size
unsplit."""
GROUP_BYTES = 2_500
"""A group's entries in sorted sets, its two hashes without prompt and payload, and the payload's key."""
TICKET_BYTES = 6_000
"""An RQ job, which RQ keeps for a minute after it has finished."""
SAMPLE_BYTES = 600
"""A sample without its arrays: lengths, versions, reward, sampling parameters."""
ROW_BYTES = 64
"""A sample's row, which stays with its group: reward, lengths, and tokens by weights version."""
HEADROOM = 1.3
"""Admission stops at 0.8 of maxmemory; the rest is for connection buffers."""


@dataclass(frozen=True, slots=True)
class TaskSize:
    """The settings that decide how much memory a task takes.

    Of `payload_bytes`, `spread_bytes` are spread over the primaries of a cluster, and `outside_bytes` are in a folder
    or a bucket.
    """

    rules: TaskRules
    payload_bytes: int  # of one finished group, encoded
    checkpoint_steps: int  # train steps between two checkpoints
    surplus_groups: int = 0  # scheduled beyond the bound, or inserted
    audited_groups: int = 0  # kept after a filter rejected them
    spread_bytes: int = 0
    outside_bytes: int = 0

    @property
    def away_bytes(self) -> int:
        """The part of `payload_bytes` that is not on the server of the task's slot."""
        return self.spread_bytes + self.outside_bytes


def scheduled_groups(size: TaskSize) -> int:
    """The most groups pending, running, or awaiting training, for the steps that the live weights may still serve."""
    return (size.rules.stale_threshold + 1) * _largest_batch(size.rules) + size.surplus_groups


def live_groups(size: TaskSize) -> int:
    """The most groups of a task that are stored at once."""
    rules = size.rules
    kept_steps = size.checkpoint_steps if rules.resume == "durable" else 0
    waiting_expired = max(0, rules.tail_batch_trigger_size)
    return scheduled_groups(size) + kept_steps * _largest_batch(rules) + waiting_expired + size.audited_groups


def group_bytes(payload_bytes: int) -> float:
    """Memory of one stored group whose samples take `payload_bytes` encoded."""
    return PAYLOAD_FACTOR * payload_bytes + GROUP_BYTES


def salvaged_groups(size: TaskSize) -> int:
    """The most groups with samples in parts: with partial rollout, all scheduled groups."""
    return scheduled_groups(size) if size.rules.partial_rollout else 0


def parts_bytes(payload_bytes: int) -> float:
    """Memory of an unfinished group's parts, in addition to its finished samples, which are also stored whole."""
    return PAYLOAD_FACTOR * min(PARTS_FACTOR * payload_bytes, MOST_PART_BYTES)


def used_bytes(tasks: Iterable[TaskSize], *, weights_bytes: int = 0) -> int:
    """The most memory that a run takes on one server. `weights_bytes` is the size of all weights kept in the server."""
    return math.ceil(sum(_slot_bytes(size) + scheduled_groups(size) * TICKET_BYTES for size in tasks) + weights_bytes)


def primary_bytes(
    here: Iterable[TaskSize], tasks: Iterable[TaskSize], primaries: int, *, weights_bytes: int = 0
) -> int:
    """The most memory on one of the `primaries` of a cluster, with RQ's tickets elsewhere.

    `here` holds the tasks whose slots this primary has, out of all `tasks` of the run. `weights_bytes` is the size of
    all weights kept on it.
    """
    spread = sum(live_groups(size) * PAYLOAD_FACTOR * size.spread_bytes for size in tasks)
    return math.ceil(sum(map(_slot_bytes, here)) + spread / primaries + weights_bytes)


def outside_bytes(tasks: Iterable[TaskSize]) -> int:
    """The most bytes that a run takes in a folder or a bucket."""
    return sum(live_groups(size) * size.outside_bytes for size in tasks)


def maxmemory_for(used: int) -> int:
    """The smallest `maxmemory` that never holds back a run of `used` bytes."""
    return math.ceil(HEADROOM * used)


def largest_payload(group_size: int, prompt_tokens: int, new_tokens: int, top_ks: Sequence[int] = ()) -> int:
    """Encoded bytes of a group whose samples all reach their limits; `top_ks` holds each scorer's `top_k`.

    A prompt token takes 4 bytes. A new token takes 4 for its id, 4 for its logprob, 1 for its mask, 4 per scorer, and 8
    for each of the likeliest tokens that a scorer returns.
    """
    scores = sum(4 + 8 * top_k for top_k in top_ks)
    return group_size * (4 * prompt_tokens + (9 + scores) * new_tokens + SAMPLE_BYTES)


def placed(size: TaskSize, kept_bytes: int, *, min_outside: int | None, spread: bool) -> TaskSize:
    """`size` with its payload, minus `kept_bytes`, assigned to the place that stores it.

    At `min_outside` bytes or more, this is a folder or a bucket; below, it is all primaries for a large frame with
    `spread`, and the task's slot otherwise.
    """
    frame_bytes = size.payload_bytes - kept_bytes
    if min_outside is not None and frame_bytes >= min_outside:
        return replace(size, outside_bytes=frame_bytes)
    return replace(size, spread_bytes=frame_bytes) if spread and is_large(frame_bytes) else size


def kept_bytes(group_size: int, prompt_tokens: int) -> int:
    """Bytes that a group with its frame outside leaves in the task's slot: its prompt, and its samples' rows."""
    return 4 * prompt_tokens + group_size * ROW_BYTES


def _slot_bytes(size: TaskSize) -> float:
    """Memory on the server of the task's slot. Samples of unfinished groups are always there."""
    groups = live_groups(size) * group_bytes(size.payload_bytes - size.away_bytes)
    parts = salvaged_groups(size) * (parts_bytes(size.payload_bytes) + PAYLOAD_FACTOR * size.away_bytes)
    return groups + parts


def _largest_batch(rules: TaskRules) -> int:
    return max(
        groups_at(rules.batch_groups, rules.schedule, step) for step in (1, *(step for step, _ in rules.schedule))
    )
