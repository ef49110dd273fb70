"""Trials of episodes without a model, for checks: rows are opened twice, many at once, and closed."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from rollq.buffer.values.failures import SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.environments.episodes import ENV, OPENING
from rollq.environments.kinds import Finding, Level
from rollq.workers.agents.environments import Environment, Environments, Limits, Opening, Step, TurnEnvironment
from rollq.workers.agents.turns import Turn

AT_ONCE: Final = 16
SAID: Final = "0"
"""The model's turn in a trial."""
LIMITS: Final = Limits(max_turns=1, setup_s=60.0, step_s=60.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """One opening of a row's episode and the answer to `SAID`, or the reason for its failure."""

    opening: Opening | None = None
    step: Step | None = None
    problem: str = ""
    seconds: float = 0.0


async def try_rows(
    make: Callable[[], Environment | TurnEnvironment], rows: Sequence[Mapping[str, Any]]
) -> list[Finding]:
    """Faults in these rows' episodes. Each episode is opened twice, `AT_ONCE` at the same time."""
    environments, slots = Environments(make, LIMITS), asyncio.Semaphore(AT_ONCE)
    tries = [_try(environments, slots, row) for row in rows for _ in range(2)]
    trials = await asyncio.gather(*tries)
    return list(_findings(rows, list(zip(trials[::2], trials[1::2], strict=True))))


def prompt_of(row: Mapping[str, Any]) -> Prompt:
    """A row's prompt, in the form that a worker gets."""
    content = row["prompt"] if "prompt" in row else tuple(row["messages"])
    return Prompt(content, metadata={ENV: row[ENV]})


async def _try(environments: Environments, slots: asyncio.Semaphore, row: Mapping[str, Any]) -> Trial:
    async with slots:
        started = time.perf_counter()
        try:
            async with environments.open() as environment:
                opening = await environments.setup(environment, prompt_of(row), "check")
                seconds = time.perf_counter() - started
                return Trial(opening, await environments.step(environment, Turn(SAID, SAID), SAID), seconds=seconds)
        except SampleFailed as error:
            return Trial(problem=str(error))


def _compared(first: Trial, second: Trial) -> tuple[Level, str]:
    """The fault that two episodes of a row show; empty if there is none."""
    if problem := first.problem or second.problem:
        return Level.ERROR, problem
    if first.opening != second.opening:
        return Level.ERROR, "two episodes of this row opened differently"
    return Level.WARNING, "" if first.step == second.step else f"two episodes of this row answered {SAID!r} differently"


def _opening_seconds(pairs: Sequence[tuple[Trial, Trial]]) -> list[float]:
    return [trial.seconds for pair in pairs for trial in pair if trial.opening is not None]


def _findings(rows: Sequence[Mapping[str, Any]], pairs: Sequence[tuple[Trial, Trial]]) -> Iterator[Finding]:
    for index, pair in enumerate(pairs):
        level, problem = _compared(*pair)
        if problem:
            yield Finding(level, problem, index)
    if len(rows) > 1 and len({row[ENV][OPENING] for row in rows}) == 1:
        yield Finding(Level.NOTE, "all rows open the same way: nothing visible depends on the row")
    if seconds := _opening_seconds(pairs):
        yield Finding(
            Level.NOTE,
            f"an episode opens in {median(seconds):.2f} s, the slowest in {max(seconds):.2f} s, {AT_ONCE} at once",
        )
