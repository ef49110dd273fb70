"""How near `wanted_workers` is to the number of workers that a run needs, with fewer and with more workers than needed.
With the needed number, all tokens of a batch take no longer to generate than training takes. The time of training is
chosen half a worker's work away from the point where another worker is needed. Answers have equal lengths, or lengths
from the trace, whose longest answers leave places empty. The metric is read before the last step, as `rollq status`
reads it.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np

from benchmarks.production import read_lengths
from benchmarks.results import Result
from benchmarks.scaled_run import RUN, SAMPLES, Gpu, Plan, Roles, started, trees
from benchmarks.scaling import EQUAL_TOKENS, KINDS, warm_up
from rollq.buffer.buffer import Buffer
from rollq.buffer.tickets import open_queue
from rollq.monitor.status.read import read_status
from rollq.monitor.status.wanted_workers import wanted_workers

NEEDED = (1.5, 5.5)
"""The work of a batch, in the work of one worker during training."""
WORKERS = (1, 8)
"""The numbers of workers in the runs."""
ANSWER_S = 1.0
"""The seconds that an answer of the mean length takes at full speed."""
LEAST_S = 25.0
"""The least seconds that a run takes: rates need some history, which has a row each 10 s."""


def measure(quick: bool) -> list[Result]:
    """A result for each kind of run, each length, each needed number and each number of workers."""
    lengths = {"equal": (EQUAL_TOKENS,)} if quick else {"equal": (EQUAL_TOKENS,), "trace": read_lengths()}
    return [
        wanted(kind, max_staleness, name, chosen, needed, workers)
        for kind, max_staleness in KINDS.items()
        for name, chosen in lengths.items()
        for needed in (NEEDED[:1] if quick else NEEDED)
        for workers in (WORKERS[:1] if quick else WORKERS)
    ]


def wanted(kind: str, max_staleness: int, name: str, lengths: Sequence[int], needed: float, workers: int) -> Result:
    """The wanted number at the end of a run with `workers` workers, and the needed number."""
    mean = float(np.mean(lengths))
    gpu = Gpu(mean / ANSWER_S)
    batch_s = SAMPLES * mean / gpu.most_tokens_per_s
    train_s = batch_s / needed
    generation_s = batch_s / workers
    step_s = max(train_s, generation_s) if max_staleness else train_s + generation_s
    steps = 1 + warm_up(max_staleness) + ceil(LEAST_S / step_s)
    plan = Plan((gpu,) * workers, lengths, max_staleness, steps, train_s=train_s)
    seen: list[dict[str, float]] = []

    def look(roles: Roles) -> None:
        if len(roles.steps) == steps - 1:  # after the last one, the trainer ends
            seen.append(read(roles))

    with started(plan, trees()[""]) as roles:
        roles.train(look)
    true = float(ceil(needed))
    return Result(
        f"wanted-{kind}-{name}-{true:.0f}-of-{workers}",
        f"wanted workers less the needed number, {kind}, {name} lengths, {true:.0f} needed, {workers} there; plus 1",
        "workers",
        2.0,
        "lower",
        (1 + abs(seen[0]["wanted"] - true),),
        {**seen[0], "needed": true, "workers": float(workers), "train_s": train_s},
    )


def read(roles: Roles) -> dict[str, float]:
    """The wanted number, and the time that a step took and waited."""
    with Buffer.connect(roles.url, RUN) as buffer:
        run = read_status(buffer, open_queue(roles.url, RUN))
    assert run.trainer is not None
    return {
        "wanted": float(wanted_workers(run) or 0),
        "busy_s": run.trainer.busy_s or 0.0,
        "waited_s": run.trainer.waited_s or 0.0,
    }
