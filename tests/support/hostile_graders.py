"""A grader that runs the model's text as code, as some graders of published packages do."""

from functools import cache
from typing import Any

from rollq.workers.judging.rewards import Answer

KEPT: list[int] = []
MADE: list[str] = []


def grade(text: str, *given: Any) -> Answer:
    """What `text`, run as code, leaves in the variable `reward`."""
    names: dict[str, Any] = {"given": given, "__name__": __name__}
    exec(text, names)  # noqa: S102 - the fault that sealed processes are for
    reward: Answer = names.get("reward", 0.0)
    return reward


@cache
def entry(index: int) -> int:
    """Remember that this was called in this process."""
    MADE.append(str(index))
    return len(MADE)


def grade_entry(index: int) -> float:
    """How often entries were made, with the one of this index; the process keeps what it makes before calls."""
    return float(entry(index) + 10 * len(MADE))
