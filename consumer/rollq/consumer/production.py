"""Takes and describes tasks' production between two train steps."""

from collections.abc import Iterable, Sequence
from typing import Any

from rollq.buffer.calls.replies.tasks import Production
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.rules.shards import add_up, task_of


def take_production(buffer: TrainerBuffer, shards: Iterable[str]) -> dict[str, Production]:
    """Return the production of each task since the last call, over all its `shards`."""
    taken: dict[str, list[Production]] = {}
    for shard in shards:
        taken.setdefault(task_of(shard), []).append(buffer.take_production(shard))
    return {task: together(productions) for task, productions in taken.items()}


def describe_production(production: Production) -> dict[str, Any]:
    """Describe a task's production since the last step, as plain numbers.

    `groups` counts groups by the status they were filed under; `tokens_per_s` counts new tokens; `reward` is the mean
    over judged samples before filters, None if there are none; `group_generate_time_s` describes at most the last 1000
    groups of each shard, see `summarise_times`.
    """
    sums = dict(production.sums)
    tokens, reward, judged = (sums.pop(name, 0) for name in ("tokens", "reward_sum", "reward_count"))
    return {
        "groups": {name: int(number) for name, number in sums.items()},
        "tokens_per_s": tokens / production.seconds if production.seconds else 0.0,
        "reward": reward / judged if judged else None,
        "group_generate_time_s": summarise_times(production.timings_ms),
    }


def together(shards: Sequence[Production]) -> Production:
    """The total production of a task's shards."""
    return Production(
        seconds=max(shard.seconds for shard in shards),
        sums=add_up(shard.sums for shard in shards),
        timings_ms=tuple(timing for shard in shards for timing in shard.timings_ms),
    )


def summarise_times(timings_ms: Sequence[int]) -> dict[str, float]:
    """Count, mean, p50 and p99 in seconds of durations in milliseconds; only the count if there are none.

    p50 is sorted[n // 2], and p99 is sorted[int(0.99 n)].
    """
    ordered = sorted(timings_ms)
    n = len(ordered)
    if not n:
        return {"count": 0}
    return {
        "count": n,
        "mean": sum(ordered) / n / 1000,
        "p50": ordered[n // 2] / 1000,
        "p99": ordered[int(0.99 * n)] / 1000,
    }
