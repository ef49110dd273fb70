"""Entries of generators that draw from random numbers of the whole process."""

from dataclasses import fields
from itertools import islice

import pytest

from rollq.environments.expansion import Environment
from rollq.environments.reasoning_gym.package import OURS, generators, options_of
from rollq.environments.rows import made_rows


@pytest.mark.long
@pytest.mark.parametrize("generator", ["codeio", "list_functions"])
def test_rows_are_the_same_from_two_processes(generator: str) -> None:
    environment = Environment(f"reasoning-gym:{generator}", {}, "train", 20)
    first, second = (list(islice(made_rows(environment), 20)) for _ in range(2))
    assert first == second


def test_generators_and_their_options_are_read_without_an_import() -> None:
    from reasoning_gym.factory import DATASETS

    assert generators().keys() == DATASETS.keys()
    for name, (_, config) in DATASETS.items():
        assert options_of(name) == {field.name for field in fields(config)} - OURS
