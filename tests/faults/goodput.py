"""Trained tokens per second of a run while its roles are killed, against the same run without faults."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from faults.chaos import RANK_NAMES, Outcome, Scene, run_chaos, worker_names
from faults.history import OK, Event
from faults.plan import CALM, SERVER, Fault
from faults.processes import Load

WORKERS = 10
LOAD = Load(
    group_size=4,
    samples_in_flight=32,
    lengths=range(400, 1601, 20),
    tokens_per_s=60.0,
    lease_s=2.0,
    partial_rollout=True,
)
FIRST_FAULT_S = 60.0
TRAINER_EVERY, SERVER_EVERY = 8, 12
"""Kills of the trainer and of the server: once in so many steps."""
NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class Goodput:
    """Tokens of the steps that count, in the seconds from the first one to the last, and the run itself."""

    name: str
    tokens: int
    steps: int
    seconds: float
    outcome: Outcome

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second."""
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds / self.steps


def measure(
    folder: Path, lasts_s: float, max_staleness: int, batch_groups: int, name: str, plan: Sequence[Fault]
) -> Goodput:
    """Run for `lasts_s` seconds with the faults of a plan, and count. The workers make 80 groups at a time."""
    load = replace(LOAD, max_staleness=max_staleness, batch={"math": batch_groups})
    scene = Scene(
        seed=0, faults=0, odds=CALM, workers=WORKERS, plan=plan, load=load, modes=("replay",), release_every=0,
        lasts_s=lasts_s,
    )  # fmt: skip
    outcome = run_chaos(scene, folder / name)
    (first_s, _), *others = trained_tokens(outcome.events)
    return Goodput(name, sum(tokens for _, tokens in others), len(others), others[-1][0] - first_s, outcome)


def trained_tokens(events: Sequence[Event]) -> list[tuple[float, int]]:
    """When each step was first committed, in seconds, and its tokens. What is trained again counts once."""
    tokens = {event["step"]: event["tokens"] for event in events if event.what == "train"}
    committed: dict[int, float] = {}
    for event in events:
        if event.what == "commit" and event.end == OK and event["step"] in tokens:
            committed.setdefault(event["step"], event.ended_ns / NS_PER_S)
    return sorted((at_s, tokens[step]) for step, at_s in committed.items())


def make_goodput_plan(step_s: float, lasts_s: float) -> list[Fault]:
    """In every step's time a tenth of the workers is killed, and now and then the trainer and the server."""
    names, faults = worker_names(WORKERS), []
    for step in range(int((lasts_s - FIRST_FAULT_S) / step_s)):
        at_s = FIRST_FAULT_S + step * step_s
        faults.append(Fault(at_s, "kill", names[step % WORKERS]))
        if step % TRAINER_EVERY == TRAINER_EVERY // 2:
            faults.append(Fault(at_s + step_s / 3, "kill", RANK_NAMES[0]))
        if step % SERVER_EVERY == SERVER_EVERY // 2:
            faults.append(Fault(at_s + 2 * step_s / 3, "kill", SERVER))
    return faults
