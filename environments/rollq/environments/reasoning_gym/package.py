"""Reads the installed package reasoning-gym without importing it, which takes seconds."""

import ast
import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Final

from rollq.buffer.common.suggestions import did_you_mean
from rollq.buffer.errors import ConfigError

PACKAGE: Final = "reasoning-gym"
INSTALL: Final = "pip install 'rollq[reasoning-gym]'"
OURS: Final = frozenset({"seed", "size"})
"""Every generator's options that rollq sets."""
_REGISTERED: Final = re.compile(r'^register_dataset\(\s*(?:DATASET_NAME|"(\w+)")\s*,\s*\w+\s*,\s*(\w+)', re.MULTILINE)
_NAME: Final = re.compile(r'^DATASET_NAME = "(\w+)"', re.MULTILINE)
WRONG: Final = {
    "boxnet": "gives its own answers 0",
    "complex_arithmetic": 'gives "nan" the full reward',
    "game_of_life_halting": "gives any text the full reward",
    "graph_color": "gives its own answers 0",
    "propositional_logic": "gives its own answers 0",
    "rubiks_cube": "gives its own answers 0",
    "rush_hour": "gives its own answers 0",
}
"""Generators with useless graders. `tests/with_environments/test_reasoning_gym.py` compares this list with the findings
of checks."""


def installed() -> str:
    """The package's version from its metadata, since `__version__` differs; empty if not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


@cache
def generators() -> Mapping[str, tuple[Path, str]]:
    """The package's generators, each with its options' file and class; empty without the package."""
    folders = getattr(find_spec("reasoning_gym"), "submodule_search_locations", None) or ()
    found = {}
    for path in chain.from_iterable(Path(folder).rglob("*.py") for folder in folders):
        text = path.read_text("utf-8")
        own = next(iter(_NAME.findall(text)), "")
        for made in _REGISTERED.finditer(text):
            if name := made[1] or own:
                found[name] = (path, made[2])
    return found


@cache
def options_of(name: str) -> frozenset[str]:
    """A generator's options, except those that rollq sets; empty if its source does not list any."""
    path, options = generators()[name]
    targets = [node.target for node in _body_of(path, options) if isinstance(node, ast.AnnAssign)]
    return frozenset(target.id for target in targets if isinstance(target, ast.Name)) - OURS


def _body_of(path: Path, name: str) -> list[ast.stmt]:
    """The body of the class `name` without bases; empty if the file has no such class."""
    classes = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    return next((node.body for node in classes if node.name == name and not node.bases), [])


def problem_of(name: str, options: Collection[str]) -> str:
    """Why this generator does not exist or does not take these options; empty without the package."""
    if not (known := generators()):
        return ""
    if name not in known:
        shown = "`rollq env list reasoning-gym` shows all names"
        return f"env: reasoning-gym has no generator {name!r}; {shown}{did_you_mean(name, known)}"
    taken = options_of(name)
    for key in sorted(set(options) - taken) if taken else ():
        allowed = f"{name} has {', '.join(sorted(taken))}"
        return f"env_options.{key}: unknown key; {allowed}{did_you_mean(key, taken)}"
    return ""


def check_right(name: str) -> None:
    """Raise `ConfigError` for a generator with a useless grader."""
    if name in WRONG:
        raise ConfigError(
            f'env = "reasoning-gym:{name}": its grader {WRONG[name]}: choose another generator, or set '
            "env_options.trust_graders = true"
        )
