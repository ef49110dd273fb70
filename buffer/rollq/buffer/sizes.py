"""How many groups of a task the batch of a step takes: `batch_groups`, until the schedule says otherwise. Pure."""

from collections.abc import Sequence

Schedule = Sequence[tuple[int, int]]
"""(step, groups), steps counting up: from that train step on, batches take so many groups."""


def groups_at(batch_groups: int, schedule: Schedule, step: int) -> int:
    """Groups in the batch of `step` (from 1)."""
    return next((groups for first, groups in reversed(schedule) if first <= step), batch_groups)


def groups_through(batch_groups: int, schedule: Schedule, step: int) -> int:
    """Groups in the batches of steps 1 to `step` together; the buffer's functions compute the same."""
    total, start, size = 0, 1, batch_groups
    for first, groups in schedule:
        if first > step:
            break
        total, start, size = total + (first - start) * size, first, groups
    return total + (step - start + 1) * size
