"""The graders of reasoning-gym, nine of which run the model's text as code."""

from functools import lru_cache
from importlib import import_module
from typing import Any, Final

reasoning_gym = import_module("reasoning_gym")  # has no types

EXECUTING: Final = (
    "binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication", "puzzle24",
    "simple_integration", "spiral_matrix", "string_insertion",
)  # fmt: skip


@lru_cache(16)
def made(name: str) -> tuple[Any, dict[str, Any]]:
    """A data set, and its first entry."""
    data = reasoning_gym.create_dataset(name, seed=1, size=1)
    return data, data[0]


def score(name: str, text: str) -> float:
    """The reward of a text for the first entry."""
    data, entry = made(name)
    return float(data.score_answer(text, entry))


def score_own(name: str) -> float:
    """The reward of the entry's own answer."""
    return score(name, made(name)[1]["answer"])
