"""A worker joins in the middle of a step, and another is killed in the middle of a step: how soon the first has work,
and the cost of the second. Production is synchronous, with engines of 64 slots, so that most of a batch has not started
when the worker joins. With `AGAINST` (see `benchmarks.scaling`), the other tree takes turns.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.engine_record import group_of, repeated_groups
from benchmarks.results import Result
from benchmarks.scaled_run import Gpu, Plan, Roles, started, trees
from benchmarks.scaling import EQUAL_TOKENS

WORKERS = 3
SLOTS = 64
JOINS_AFTER, KILLED_AFTER, STEPS = 1, 3, 4
POLL_S = 0.01
MIDDLE_S = 0.5
"""How far into a step the event happens, as a multiple of the time for one answer."""


@dataclass(slots=True)
class Events:
    """The time when the joining worker first reported, and the killed worker's groups that were not trained by then."""

    answer_s: float
    joined_s: float = 0.0
    killed_s: float = 0.0
    held: frozenset[int] = frozenset()

    def happen(self, roles: Roles) -> None:
        """Called after each step."""
        if len(roles.steps) == JOINS_AFTER:
            time.sleep(MIDDLE_S * self.answer_s)
            before = roles.workers_that_report()
            roles.add_worker()
            while roles.workers_that_report() == before:
                time.sleep(POLL_S)
            self.joined_s = time.monotonic()
        elif len(roles.steps) == KILLED_AFTER:
            time.sleep(MIDDLE_S * self.answer_s)
            self.killed_s = roles.kill(0)
            trained = {group for step in roles.steps for group in step.groups}
            self.held = frozenset(group_of(sample) for _, sample in roles.records()[0].asked) - trained


def measure(quick: bool) -> list[Result]:
    """One result for the worker that joins, and one for the worker that is killed."""
    answer_s = 0.5 if quick else 4.0
    sides = {}
    for name, tree in trees().items():
        gpus = (Gpu(EQUAL_TOKENS / answer_s, full=SLOTS, slots=SLOTS),) * (WORKERS + 1)
        with started(Plan(gpus, (EQUAL_TOKENS,), 0, STEPS), tree, WORKERS) as roles:
            events = Events(answer_s)
            roles.train(events.happen)
            sides[name] = figures(roles, events)
    return [
        _result("joins", "from the first report of a worker that joins in a step to its first sequence", 2.0, sides),
        _result("killed", "groups lost or sampled twice, beyond those that a killed worker held, plus 1", 1.0, sides),
    ]


def figures(roles: Roles, events: Events) -> dict[str, float]:
    """Seconds and groups."""
    records = roles.records()
    first_s = records[WORKERS].first_start_s()
    trained = [group for step in roles.steps for group in step.groups]
    wanted = STEPS * roles.plan.batch_groups
    lost = wanted - len(set(trained))
    elsewhere = repeated_groups(records) - events.held
    return {
        # Without work in the whole run, it waits until the end.
        "joins": max(POLL_S, (first_s or roles.steps[-1].at_s) - events.joined_s),
        "killed": 1.0 + lost + len(elsewhere),
        "lost_groups": float(lost),
        "held_groups": float(len(events.held)),
        "repeated_groups": float(len(repeated_groups(records))),
        "repeated_elsewhere_groups": float(len(elsewhere)),
        "step_after_the_kill_s": roles.steps[-1].at_s - events.killed_s,
    }


def _result(key: str, what: str, target: float, sides: Mapping[str, Mapping[str, float]]) -> Result:
    details = {
        f"{side}_{name}" if side else name: value for side, each in sides.items() for name, value in each.items()
    }
    unit = "s" if key == "joins" else "groups"
    return Result(f"membership-{key}", what, unit, target, "lower", (sides[""][key],), details)
