"""Calls for judge processes. Only these processes import the package, on the first call."""

from typing import Any

from rollq.buffer.values.failures import FailureKind, SampleFailed


def prepare(name: str, options: str, seed: int, question: str) -> None:
    """Keep a seed's entry for later calls. Raises `SampleFailed` if its question differs from the row's."""
    from rollq.environments.reasoning_gym.generators import entry

    made = entry(name, options, seed)["question"]
    if made not in question:  # the user may add words around it
        raise SampleFailed(
            FailureKind.ENVIRONMENT, f"the environment opened with {made!r:.200}, but its row has {question!r:.200}"
        )


def grade(name: str, options: str, seed: int, answer: str | None) -> dict[str, Any]:
    """The score of an answer; None scores the entry's reference answer. Raises the grader's exceptions."""
    from rollq.environments.reasoning_gym.generators import entry, score

    made = entry(name, options, seed)
    return {"score": score(name, options, made, made["answer"] if answer is None else answer)}
