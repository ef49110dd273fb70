"""Batches that cannot be shared by whole groups: fewer groups than workers, and a slow machine at the end of a batch.

Production is synchronous, with `spread = "never"` and by default, in turns.
"""

from benchmarks.results import Result
from benchmarks.scaled_run import ROOT, SAMPLES, Gpu, Plan, Roles, started
from benchmarks.scaling import EQUAL_TOKENS, TAIL_SEQUENCE_S, heavy_tail, warm_up

WORKERS, FEW_GROUPS = 4, 2
SLOW = 0.25
"""The speed of one machine, divided by the speed of the others."""
STEPS = 4
LEAST_GAIN = 1.0


def measure(quick: bool) -> list[Result]:
    """One result for few groups, and one for a slow machine."""
    step_s, steps = (0.5, 1) if quick else (16.0, STEPS)
    gpu = Gpu(EQUAL_TOKENS / step_s * SAMPLES / Gpu(1.0).full / WORKERS)
    few = Plan(
        (gpu,) * WORKERS, (EQUAL_TOKENS,), 0, warm_up(0) + steps,
        batch_groups=FEW_GROUPS, group_size=SAMPLES // FEW_GROUPS,
    )  # fmt: skip
    lengths = heavy_tail()
    sequence_s = 1.0 if quick else 2 * TAIL_SEQUENCE_S
    fast, slow = (Gpu(speed * max(lengths) / sequence_s) for speed in (1.0, SLOW))
    tail = Plan((fast,) * (WORKERS - 1) + (slow,), lengths, 0, warm_up(0) + 2 * steps, partial_rollout=True)
    return [
        compared("spread-groups", f"time of a batch of {FEW_GROUPS} groups on {WORKERS} workers", few),
        compared("spread-tail", f"time of a batch with a heavy tail, where one of {WORKERS} machines is slow", tail),
    ]


def compared(name: str, what: str, plan: Plan) -> Result:
    """How many times as long a step takes if no sample is lent."""
    times_s = {spread: step_s(plan, spread) for spread in ("tail", "never")}
    details = {f"{spread}_step_s": seconds for spread, seconds in times_s.items()}
    return Result(
        name, f"{what}, with samples of groups at one worker over the default", "times", LEAST_GAIN, "higher",
        (times_s["never"] / times_s["tail"],), details,
    )  # fmt: skip


def step_s(plan: Plan, spread: str) -> float:
    """Seconds that a step takes."""
    with started(plan, ROOT, spread=spread) as roles:
        roles.train()
        return _mean_step_s(roles)


def _mean_step_s(roles: Roles) -> float:
    skipped = warm_up(roles.plan.max_staleness)
    return (roles.steps[-1].at_s - roles.steps[skipped - 1].at_s) / (len(roles.steps) - skipped)
