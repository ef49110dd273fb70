"""How many groups of each task a step's batch takes. Pure."""

import math
from collections.abc import Sequence
from fractions import Fraction

Schedule = Sequence[tuple[int, int]]
"""(step, groups) in ascending step order: the number of groups in a batch from that train step on."""


def groups_at(batch_groups: int, schedule: Schedule, step: int) -> int:
    """The number of groups in the batch of `step` (from 1)."""
    return next((groups for first, groups in reversed(schedule) if first <= step), batch_groups)


def groups_through(batch_groups: int, schedule: Schedule, step: int) -> int:
    """The total number of groups in the batches of steps 1 to `step`; the buffer's functions compute the same."""
    total, start, size = 0, 1, batch_groups
    for first, groups in schedule:
        if first > step:
            break
        total, start, size = total + (first - start) * size, first, groups
    return total + (step - start + 1) * size


def is_retired(batch_groups: int, schedule: Schedule, step: int) -> bool:
    """Whether, from `step` on, no batch takes groups of a task."""
    later = [groups for first, groups in schedule if first > step]
    return not any([groups_at(batch_groups, schedule, step), *later])


def share_by_weight(total: int, weights: Sequence[tuple[str, float]]) -> dict[str, int]:
    """Share `total` groups among tasks by (name, weight): the largest remainder method (Hamilton 1792).

    Every task gets its share rounded down; the rest goes to the largest remainders, with ties in the given order.
    Raises `ValueError` for a name that is listed twice, a negative total or weight, and weights that are all 0.
    """
    if total < 0:
        raise ValueError(f"{total} groups cannot be shared: must be 0 or more")
    names = [name for name, _ in weights]
    _check_weights(weights, names)
    together = _sum_of_weights(weights)
    exact = {name: total * Fraction(weight) / together for name, weight in weights}
    shares = {name: math.floor(share) for name, share in exact.items()}
    by_remainder = sorted(names, key=lambda name: shares[name] - exact[name])  # sorting keeps the order of ties
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _check_weights(weights: Sequence[tuple[str, float]], names: Sequence[str]) -> None:
    for name, weight in weights:
        if names.count(name) > 1:
            raise ValueError(f"task {name!r} is listed twice")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"task {name!r}: weight {weight!r} must be a number, 0 or more")


def _sum_of_weights(weights: Sequence[tuple[str, float]]) -> Fraction:
    together = sum((Fraction(weight) for _, weight in weights), Fraction(0))
    if together == 0:
        raise ValueError(
            f"the weights of {', '.join(map(repr, dict(weights))) or 'no tasks'} are all 0: at least one must be "
            "positive"
        )
    return together
