"""Entries of generators that draw from random numbers of the whole process."""

from itertools import islice

import pytest

from rollq.environments.expansion import Environment
from rollq.environments.rows import made_rows


@pytest.mark.parametrize("generator", ["codeio", "list_functions"])
def test_rows_are_the_same_from_two_processes(generator: str) -> None:
    environment = Environment(f"reasoning-gym:{generator}", {}, "train", 20)
    first, second = (list(islice(made_rows(environment), 20)) for _ in range(2))
    assert first == second
