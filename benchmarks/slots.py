"""Slots of an engine: whether all are busy, how long ten batches take, how near asynchronous production comes to the
longer of generation and training, and whether the trained answers are as long as the admitted answers. There is one
worker with a simulated engine that runs 64 sequences (128 for the ten batches), and groups of 8. With `AGAINST` (see
`benchmarks.scaling`), the other tree takes turns, with as many groups in flight as fill the slots.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from benchmarks.engine_record import busy_share
from benchmarks.results import Result
from benchmarks.saturating import GROUP_SIZE, sample_length
from benchmarks.scaled_run import SAMPLES, Gpu, Plan, Roles, trees
from benchmarks.scaling import TAIL_SEQUENCE_S, all_lengths, compared, heavy_tail, run_sides, warm_up

SLOTS = 64
MORE_SLOTS = 128
TEN = 10
BUSY_STALENESS = {"trace": 2, "tail": 6}
"""Staleness bounds that leave work while the longest answers of a batch run."""
GENERATION_S = 4.0
KNOWN_PROMPTS = 192
"""The prompts of three batches; after these, statistics of all prompts are known."""


def measure(quick: bool) -> list[Result]:
    """Busy slots for two kinds of lengths, ten batches with a heavy tail, and training as long as generation."""
    steps = 2 if quick else TEN
    results = [busy(name, lengths, steps) for name, lengths in all_lengths().items() if not quick or name == "trace"]
    results += overlap(all_lengths()["trace"], steps, 0.5 if quick else GENERATION_S)
    if not quick and len(trees()) > 1:
        results.append(ten_batches())
    return results


def busy(name: str, lengths: Sequence[int], steps: int) -> Result:
    """The share of slots with a sequence, once as many batches are in progress as the bound allows."""
    max_staleness = BUSY_STALENESS[name]
    gpu = Gpu(max(lengths) / TAIL_SEQUENCE_S, full=SLOTS, slots=SLOTS)
    plan = Plan((gpu,), lengths, max_staleness, warm_up(max_staleness) + steps)
    sides = run_sides(plan, slots_and_lengths, by_group=SLOTS // GROUP_SIZE)
    return compared(
        f"slots-{name}",
        f"share of {SLOTS} slots that are busy, asynchronous, max_staleness {max_staleness}, lengths of the {name}",
        0.95,
        sides,
        lambda details: details["busy"],
    )


def overlap(lengths: Sequence[int], steps: int, generation_s: float) -> list[Result]:
    """Asynchronous production with training as long as generation: its closeness to the bound, and its length bias."""
    known_lengths = [sample_length(row, 0, lengths) for row in range(KNOWN_PROMPTS)]
    gpu, known_gpu = (
        Gpu(SAMPLES * float(np.mean(drawn)) / SLOTS / generation_s, full=SLOTS, slots=SLOTS)
        for drawn in (lengths, known_lengths)
    )
    plan = Plan((gpu,), lengths, 1, warm_up(1) + steps, train_s=generation_s)
    sides = run_sides(plan, of_longer_side, by_group=SLOTS // GROUP_SIZE)
    known_steps = plan.steps + KNOWN_PROMPTS // plan.batch_groups
    known = replace(plan, gpus=(known_gpu,), known_prompts=KNOWN_PROMPTS, steps=known_steps)
    return [
        compared(
            "slots-overlap-known",
            "the same where prompts come again, whose answers are as long as before, and statistics of them are kept",
            0.97,
            run_sides(known, known_overlap, by_group=SLOTS // GROUP_SIZE),
            lambda details: details["closeness"],
        ),
        compared(
            "slots-overlap",
            "asynchronous production, training as long as generation: the larger of both over what a step takes",
            0.97,
            sides,
            lambda details: details["closeness"],
        ),
        *(
            compared(
                f"slots-lengths-{which}",
                f"lengths of trained answers against admitted ones, {which}: the smaller over the larger",
                0.99,
                {side: {which: 1 + figures[f"{which}_bias_percent"] / 100} for side, figures in sides.items()},
                lambda details, which=which: min(details[which], 1 / details[which]),  # type: ignore[misc]
            )
            for which in ("mean", "p99")
        ),
    ]


def ten_batches() -> Result:
    """The time of ten batches with a heavy tail, over the time of the other tree, which admits by group."""
    lengths = heavy_tail()
    gpu = Gpu(max(lengths) / TAIL_SEQUENCE_S, full=MORE_SLOTS, slots=MORE_SLOTS)
    sides = run_sides(Plan((gpu,), lengths, 1, TEN), wall_time, by_group=MORE_SLOTS // GROUP_SIZE)
    new_s, old_s = sides[""]["wall_s"], sides["against"]["wall_s"]
    return Result(
        name="slots-ten-batches",
        what=f"time of {TEN} batches, {MORE_SLOTS} slots, heavy tail, over the time of the other tree, by group",
        unit="times",
        target=0.8,
        better="lower",
        values=(new_s / old_s,),
        details={"wall_s": new_s, "against_wall_s": old_s},
    )


def wall_time(roles: Roles) -> dict[str, float]:
    """Seconds from the first sequence to the last step."""
    first_s = roles.records()[0].first_start_s()
    assert first_s is not None
    return {"wall_s": roles.steps[-1].at_s - first_s}


def slots_and_lengths(roles: Roles) -> dict[str, float]:
    """The share of busy slots, the step time, and how much longer trained answers are than admitted answers."""
    skipped = warm_up(roles.plan.max_staleness)
    start_s, end_s = roles.steps[skipped - 1].at_s, roles.steps[-1].at_s
    trained = list(chain.from_iterable(step.lengths for step in roles.steps))
    groups = len(trained) // GROUP_SIZE
    admitted = [
        sample_length(group_id, index, roles.plan.lengths)
        for group_id in range(1, groups + 1)
        for index in range(GROUP_SIZE)
    ]
    return {
        "busy": busy_share(roles.records(), start_s, end_s, roles.plan.gpus[0].slots),
        "step_s": (end_s - start_s) / (len(roles.steps) - skipped),
        "mean_bias_percent": 100 * (float(np.mean(trained) / np.mean(admitted)) - 1),
        "p99_bias_percent": 100 * (float(np.percentile(trained, 99) / np.percentile(admitted, 99)) - 1),
    }


def of_longer_side(roles: Roles) -> dict[str, float]:
    """The longer of generation and training, divided by the time of a step."""
    figures = slots_and_lengths(roles)
    skipped = warm_up(roles.plan.max_staleness)
    tokens = [step.tokens for step in roles.steps[skipped:]]
    generation_s = float(np.mean(tokens)) / roles.plan.gpus[0].most_tokens_per_s
    bound_s = max(generation_s, roles.plan.train_s)
    return {**figures, "generation_s": generation_s, "closeness": bound_s / figures["step_s"]}


def known_overlap(roles: Roles) -> dict[str, float]:
    """Like `of_longer_side`, but without lengths, which come from a few prompts."""
    return {name: figure for name, figure in of_longer_side(roles).items() if not name.endswith("percent")}
