"""Entries of reasoning-gym's generators by seed, and answers' scores. Only child processes import this.

An entry depends only on its generator, the options and its seed, not on other entries.
"""

import random
import warnings
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, Final

import numpy as np

from rollq.buffer.common import exact_json
from rollq.environments.reasoning_gym.package import problem_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings about the package's syntax
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

CACHED: Final = 4_096
PROBES: Final = (1, 2_718, 31_415)
"""Seeds for testing whether a generator can be reused with another seed."""


def names() -> list[str]:
    """All generators."""
    return sorted(DATASETS)


class UnknownGenerator(Exception):
    """There is no generator of this name, or it does not take these options."""


@lru_cache(maxsize=CACHED)
def entry(name: str, options: str, seed: int) -> Mapping[str, Any]:
    """A seed's entry; `options` is JSON. Raises `UnknownGenerator`."""
    reused = _reused(name, options)
    return _made(name, options, seed) if reused is None else _seeded(reused, seed)


def score(name: str, options: str, made: Mapping[str, Any], answer: str) -> float:
    """The score of an answer to an entry. Raises the grader's exceptions."""
    return float(_generator(name, options).score_answer(answer, entry=dict(made)))


def entries(name: str, options: str, seeds: Iterator[int]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The seeds and their entries. Raises `UnknownGenerator`."""
    for seed in seeds:
        yield seed, entry(name, options, seed)


@cache
def _generator(name: str, options: str) -> Any:
    return _new(name, options, PROBES[0])


def _new(name: str, options: str, seed: int) -> Any:
    given = exact_json.loads(options)
    if problem := problem_of(name, given):
        raise UnknownGenerator(problem)
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=1, **given)
    except (TypeError, AssertionError, ValueError) as error:
        raise UnknownGenerator(f"env_options of {name}: {error}") from error


def _made(name: str, options: str, seed: int) -> Mapping[str, Any]:
    generator = _new(name, options, seed)
    _seed_shared_generators(seed)
    made: Mapping[str, Any] = generator[0]
    return made


def _seeded(generator: Any, seed: int) -> Mapping[str, Any]:
    generator.seed = seed
    if hasattr(generator.config, "seed"):
        generator.config.seed = seed
    _seed_shared_generators(seed)
    made: Mapping[str, Any] = generator[0]
    return made


def _seed_shared_generators(seed: int) -> None:
    """Seed the random numbers of the whole process, from which `codeio` and `list_functions` also draw."""
    random.seed(seed)
    np.random.seed(seed)


@cache
def _reused(name: str, options: str) -> Any:
    """A generator that can be reused for other seeds; None if it keeps state from its seed."""
    generator = _new(name, options, 0)
    same = all(
        (seeded["question"], seeded["answer"]) == (made["question"], made["answer"])
        for seed in PROBES
        for seeded, made in [(_seeded(generator, seed), _made(name, options, seed))]
    )
    return generator if same else None
