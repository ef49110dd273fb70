"""Calls of judge processes. The package is imported there alone, when they are made."""

import math
from typing import Any


def prepare(name: str, options: str, seed: int) -> None:
    """Keep the entry of a seed for the calls that follow."""
    from rollq.environments.reasoning_gym.entries import entry

    entry(name, options, seed)


def grade(name: str, options: str, seed: int, question: str, answer: str | None) -> dict[str, Any]:
    """The score of an answer; None is the entry's own. Otherwise a `problem` beside a score of 0.

    Raises what the grader raises.
    """
    from rollq.environments.reasoning_gym.entries import entry, score

    made = entry(name, options, seed)
    if made["question"] not in question:  # the user may put words around it
        problem = f"the environment opened with {made['question']!r:.200}, its row has {question!r:.200}"
        return {"score": 0.0, "problem": problem}
    given = score(name, options, made, made["answer"] if answer is None else answer)
    if not (math.isfinite(given) and 0 <= given <= 1):
        return {"score": 0.0, "problem": f"the grader gave {given!r}, which is not between 0 and 1"}
    return {"score": given}
