"""How much faster several workers are than one, with equal and unequal workers, and with answers of equal and unequal
lengths.

`AGAINST=FOLDER python -m benchmarks --only scaling` also runs the roles of another source tree, in turns with this
tree's roles, and shows its figures beside. Synchronous runs have `max_staleness = 0`, asynchronous runs 1. The engine
has the speed of a GPU that runs 64 sequences at full speed; more sequences, up to 256, share that speed. Training takes
no time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import NormalDist

import numpy as np

from benchmarks.engine_record import busy_share
from benchmarks.production import read_lengths
from benchmarks.results import Result
from benchmarks.scaled_run import SAMPLES, Gpu, Plan, Roles, rate, started, trees

EQUAL_TOKENS = 800
STEP_S = 4.0
"""The seconds that a step of eight workers takes if they are eight times as fast as one."""
TAIL_MEDIAN, TAIL_P99 = 800, 20_000
TAIL_SEQUENCE_S = 4.0
"""The seconds that the longest answer of the heavy tail takes at full speed; the longest answer of the trace takes as
long."""
WORKERS = {1: 2, 2: 4, 4: 4, 8: 6}
"""Number of workers -> number of steps that are measured with them, which is even since two batches may end
together."""
SPEEDS = (2.0, 1.0, 1.0, 0.5)
LEARNING_STEPS = 2
"""Steps until workers know their speeds, after a first step that goes to the workers that start first. They are not
measured."""
KINDS: Mapping[str, int] = {"synchronous": 0, "asynchronous": 1}
Score = Callable[[Roles], dict[str, float]]


def measure(quick: bool) -> list[Result]:
    """Results for 2, 4 and 8 workers, for unequal workers, and for unequal lengths, each synchronous and
    asynchronous."""
    step_s, workers = (0.5, {1: 1, 2: 1}) if quick else (STEP_S, WORKERS)
    results: list[Result] = []
    for kind, max_staleness in KINDS.items():
        results += speed_up(kind, max_staleness, step_s, workers)
        results.append(unequal_speeds(kind, max_staleness, step_s, 1 if quick else 6))
        if not quick:
            results += [
                unequal_lengths(kind, max_staleness, name, lengths, 4, 6) for name, lengths in all_lengths().items()
            ]
    return results


def all_lengths() -> dict[str, tuple[int, ...]]:
    """Lengths of answers in tokens: from the trace, and with a heavy tail."""
    return {"trace": read_lengths(), "tail": heavy_tail()}


def heavy_tail(count: int = 2000) -> tuple[int, ...]:
    """A log-normal distribution with the median and the 99th percentile of a reasoning model, cut at the latter.

    >>> lengths = heavy_tail()
    >>> round(float(np.median(lengths)), -1), max(lengths), round(float(np.mean(lengths)), -2)
    (800.0, 20000, 1900.0)
    """
    sigma = np.log(TAIL_P99 / TAIL_MEDIAN) / NormalDist().inv_cdf(0.99)
    places = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count)]
    drawn = np.exp(np.log(TAIL_MEDIAN) + sigma * np.array(places))
    return tuple(int(length) for length in np.clip(drawn, 1, TAIL_P99))


def speed_up(kind: str, max_staleness: int, step_s: float, workers: Mapping[int, int]) -> Iterator[Result]:
    """Tokens per second of several equal workers, as a share of one worker's rate times their number."""
    gpu = Gpu(EQUAL_TOKENS / step_s)
    alone: dict[str, float] = {}
    for count, steps in workers.items():
        skipped = warm_up(max_staleness) + (LEARNING_STEPS if count > 1 else 0)
        plan = Plan((gpu,) * count, (EQUAL_TOKENS,), max_staleness, skipped + steps)
        sides = run_sides(plan, partial(tokens_per_s, skipped=skipped))
        if count == 1:
            alone = {name: details["tokens_per_s"] for name, details in sides.items()}
            continue
        for name, details in sides.items():
            details["one_worker_tokens_per_s"] = alone[name]
            details["speed_up"] = details["tokens_per_s"] / alone[name]
        yield compared(
            f"scaling-{count}-{kind}",
            f"tokens per second of {count} workers, {kind}, over {count} times the rate of one",
            0.95,
            sides,
            lambda details, count=count: details["speed_up"] / count,  # type: ignore[misc]
        )


def unequal_speeds(kind: str, max_staleness: int, step_s: float, steps: int) -> Result:
    """Tokens per second of workers of unequal speed, as a share of the sum of their speeds."""
    gpus = tuple(Gpu(speed * EQUAL_TOKENS / step_s) for speed in SPEEDS)
    skipped = warm_up(max_staleness) + LEARNING_STEPS
    plan = Plan(gpus, (EQUAL_TOKENS,), max_staleness, skipped + steps)
    sides = run_sides(plan, partial(tokens_per_s, skipped=skipped))
    best_s = fastest_s(SAMPLES, EQUAL_TOKENS, gpus)
    for details in sides.values():
        # One batch at a time cannot use a slow worker whose first answers end after the others' last ones.
        details["best_synchronous_share"] = SAMPLES * EQUAL_TOKENS / best_s / details["possible_tokens_per_s"]
    return compared(
        f"scaling-unequal-{kind}",
        f"tokens per second of workers with the speeds {', '.join(f'{speed:g}' for speed in SPEEDS)}, {kind}, over the "
        "sum of their speeds",
        0.92,
        sides,
        lambda details: details["of_possible"],
    )


def unequal_lengths(
    kind: str, max_staleness: int, name: str, lengths: Sequence[int], workers: int, steps: int
) -> Result:
    """The least time that a step can take, as a share of the time that it takes, for answers of unequal lengths."""
    gpus = (Gpu(max(lengths) / TAIL_SEQUENCE_S),) * workers
    plan = Plan(gpus, lengths, max_staleness, warm_up(max_staleness) + steps)
    return compared(
        f"scaling-{name}-{kind}",
        f"{workers} workers, {kind}, lengths of the {name}: the larger of all tokens over all speeds and of the "
        "longest answer over one's speed, over what a step takes",
        0.9,
        run_sides(plan, of_bound),
        lambda details: details["of_bound"],
    )


def warm_up(max_staleness: int) -> int:
    """The steps that are not measured, until as many batches are in progress as the bound allows."""
    return 1 + max_staleness


def run_sides(plan: Plan, score: Score, by_group: int | None = None) -> dict[str, dict[str, float]]:
    """The figures of a plan on each tree. `by_group` is the number of groups that a worker of the other tree may
    hold."""
    sides = {}
    for name, tree in trees().items():
        with started(replace(plan, groups_in_flight=by_group) if name else plan, Path(tree)) as roles:
            roles.train()
            sides[name] = score(roles)
    return sides


def tokens_per_s(roles: Roles, skipped: int) -> dict[str, float]:
    """Speed after the first steps, its share of all engines' speeds, and the share of busy slots at full speed."""
    plan = roles.plan
    possible = sum(gpu.most_tokens_per_s for gpu in plan.gpus)
    measured = rate(roles.steps, skipped)
    start_s, end_s = roles.steps[skipped - 1].at_s, roles.steps[-1].at_s
    return {
        "tokens_per_s": measured,
        "possible_tokens_per_s": possible,
        "of_possible": measured / possible,
        "busy": busy_share(roles.records(), start_s, end_s, plan.gpus[0].full),
    }


def of_bound(roles: Roles) -> dict[str, float]:
    """The time of a step, and the least time that it can take. Batches that overlap share the time of their longest
    answers."""
    plan, skipped = roles.plan, warm_up(roles.plan.max_staleness)
    measured = roles.steps[skipped:]
    bounds_s = [
        step_bound_s(step.lengths, [gpu.most_tokens_per_s for gpu in plan.gpus], plan.gpus[0].tokens_per_s)
        for step in measured
    ]
    tokens_s = [sum(step.lengths) / sum(gpu.most_tokens_per_s for gpu in plan.gpus) for step in measured]
    at_once = 1 + plan.max_staleness
    bound_s = sum(max(alone_s / at_once, all_s) for alone_s, all_s in zip(bounds_s, tokens_s, strict=True))
    took_s = roles.steps[-1].at_s - roles.steps[skipped - 1].at_s
    figures = tokens_per_s(roles, skipped)
    return {
        **figures,
        "step_s": took_s / len(measured),
        "bound_s": bound_s / len(measured),
        "of_bound": bound_s / took_s,
    }


def step_bound_s(lengths: Sequence[int], speeds: Sequence[float], sequence_speed: float) -> float:
    """The least time for one batch: the longer of all tokens on all engines, and the longest answer at the speed of one
    sequence.

    >>> step_bound_s([100] * 9 + [400], [50.0, 50.0], 10.0), step_bound_s([100] * 100, [50.0, 50.0], 10.0)
    (40.0, 100.0)
    """
    return max(sum(lengths) / sum(speeds), max(lengths) / sequence_speed)


def fastest_s(samples: int, tokens: int, gpus: Sequence[Gpu]) -> float:
    """The least time in which engines make `samples` answers of `tokens` tokens, all started at once.

    >>> round(fastest_s(512, 800, [Gpu(200.0)] * 8), 3), round(fastest_s(512, 800, [Gpu(s * 200) for s in SPEEDS]), 3)
    (4.0, 8.0)
    """
    times_s = sorted({tokens / gpu.tokens_per_s for gpu in gpus})
    for early_s, late_s in zip(times_s, [*times_s[1:], np.inf], strict=True):
        speed = sum(gpu.most_tokens_per_s for gpu in gpus if tokens / gpu.tokens_per_s <= early_s)
        if (needed_s := max(early_s, samples * tokens / speed)) <= late_s:
            return needed_s
    raise AssertionError("the last interval is endless")


def compared(
    name: str,
    what: str,
    target: float,
    sides: Mapping[str, Mapping[str, float]],
    value: Callable[[Mapping[str, float]], float],
) -> Result:
    """The result of this tree, with the figures of the other tree in its details."""
    details = {f"{side}_{key}" if side else key: figure for side, each in sides.items() for key, figure in each.items()}
    for side, figures in sides.items():
        if side:
            details[f"{side}_value"] = value(figures)
    return Result(name, what, "share", target, "higher", (value(sides[""]),), details)
