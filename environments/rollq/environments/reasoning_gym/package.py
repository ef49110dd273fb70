"""The package reasoning-gym as it is installed here, without importing it."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

PACKAGE: Final = "reasoning-gym"
INSTALL: Final = "pip install 'rollq[reasoning-gym]'"
WRONG: Final = {
    "boxnet": "gives its own answers 0",
    "complex_arithmetic": 'gives "nan" the full reward',
    "game_of_life_halting": "gives every text the full reward",
    "graph_color": "gives its own answers 0",
    "propositional_logic": "gives its own answers 0",
    "rubiks_cube": "gives its own answers 0",
    "rush_hour": "gives its own answers 0",
}
"""Generators whose graders teach nothing. `tests/with_environments/test_reasoning_gym.py` compares them with what
checks find."""


def installed() -> str:
    """Its version from its metadata, since it gives another one itself; empty without it."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""
