"""How many workers keep a run's trainer from waiting. Pure."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollq.buffer.values.trainer_state import TrainerState
from rollq.monitor.status.production_facts import workers_of
from rollq.monitor.status.read import RunStatus, TaskStatus

LEAST_KEEP_RATE = 0.05
"""A keep rate below this is a problem with the task, which more workers do not solve."""
LEAST_SPEED = 0.5
"""All wanted workers have enough work for this fraction of their full speed."""
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Speed:
    """A worker that generates at most `places` samples: a decoding step of n takes `step_s + n * sample_step_s`."""

    step_s: float
    sample_step_s: float
    places: int

    def tokens_per_s(self, samples: float) -> float:
        """Tokens per second with `samples`; samples without a place wait."""
        n = min(samples, self.places)
        return n / (self.step_s + self.sample_step_s * n)


def wanted_workers(run: RunStatus) -> int | None:
    """The number of workers that would keep the trainer from waiting; None while any of the inputs is unknown.

    The number is 0 if the trainer has ended or no task produces, and otherwise at least 1 (see `workers_for`). The
    trainer takes `batch_groups` in the average time of a step without the wait. Only a share `keep_rate` (at least
    0.05) of the groups is worth training, so workers make more.

    In a synchronous run the trainer always waits while a batch is generated. The number is then the smallest with which
    generation takes no longer than training.
    """
    tasks = _producing(run)
    if not tasks or (run.trainer and run.trainer.has_ended):
        return 0
    speeds, needed = _speeds(run.alive_workers.values()), _needed_by_all(tasks, run.trainer)
    if not speeds or needed is None:
        return None
    groups, samples = map(sum, zip(*map(_under_way, tasks), strict=True))
    return workers_for(needed, speeds, groups=groups, samples=samples)


def _producing(run: RunStatus) -> list[TaskStatus]:
    return [task for task in run.tasks if task.is_sampled and task.control in ("run", "sleep")]


def _needed_by_all(tasks: Sequence[TaskStatus], trainer: TrainerState | None) -> float | None:
    needed = [_needed_tokens_per_s(task, trainer) for task in tasks]
    known = [tokens for tokens in needed if tokens is not None]
    return sum(known) if len(known) == len(needed) else None


def workers_for(tokens_per_s: float, speeds: Mapping[Speed, int], *, groups: int, samples: float) -> int:
    """The number of workers that make `tokens_per_s`, at least 1.

    `speeds` counts the current workers with each speed; new workers would be as fast on average. All workers
    share the `groups` and `samples` that may be under way: with more workers, each has fewer samples, and is slower.
    """
    workers = sum(speeds.values())

    def each(load: float) -> float:
        return sum(number * speed.tokens_per_s(load) for speed, number in speeds.items()) / workers

    least = LEAST_SPEED * each(max(speed.places for speed in speeds))

    def is_enough(number: int) -> bool:
        made = number * each(samples / number)
        return made >= tokens_per_s * (1 - TOLERANCE) or each(samples / (number + 1)) < least

    return 1 + bisect_left(range(1, max(1, groups)), True, key=is_enough)


def workers_in_words(run: RunStatus) -> str:
    """The workers that are alive, and how many are wanted."""
    alive, wanted = workers_of(run), wanted_workers(run)
    if wanted is None:
        return alive + ("" if run.alive_workers else " (1 or more wanted)")
    return f"{alive} ({wanted} wanted)" if wanted else f"{alive}, with nothing to generate now"


def _needed_tokens_per_s(task: TaskStatus, trainer: TrainerState | None) -> float | None:
    tokens = _tokens_of_a_group(task)
    if trainer is None or not trainer.busy_s or tokens is None:
        return None
    return task.batch_groups * tokens / _keep_rate(task) / trainer.busy_s


def _tokens_of_a_group(task: TaskStatus) -> float | None:
    """Mean tokens per group in the last minute or, without groups in it, so far."""
    if task.rates and task.rates.groups:
        return task.rates.tokens / task.rates.groups
    produced = task.progress.get("produced")
    return task.progress.get("tokens", 0) / produced if produced else None


def _keep_rate(task: TaskStatus) -> float:
    return max(LEAST_KEEP_RATE, task.kept / task.outcomes) if task.outcomes else 1.0


def _under_way(task: TaskStatus) -> tuple[int, float]:
    """How many of a task's groups and samples may be under way while the trainer trains or, in a synchronous run,
    waits."""
    batches = max(1, task.stale_threshold - 1)
    groups = batches * task.batch_groups
    return groups, groups * task.group_size


def _speeds(reports: Iterable[Mapping[str, Any]]) -> Counter[Speed]:
    """How many workers have each known speed."""
    reported = (report["speed"] for report in reports if report.get("speed"))
    return Counter(Speed(speed["step_s"], speed["sample_step_s"], speed["places"]) for speed in reported)
