"""Reads the installed package reasoning-gym without importing it, which takes seconds."""

import ast
import difflib
import re
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rollq.buffer.errors import ConfigError

PACKAGE: Final = "reasoning-gym"
INSTALL: Final = "pip install 'rollq[reasoning-gym]'"
OURS: Final = frozenset({"seed", "size"})
"""Options of every generator that rollq sets."""
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
    """Its version from its metadata, since `__version__` differs; empty if not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return ""


@cache
def generators() -> Mapping[str, tuple[Path, str]]:
    """Its generators, each with the file and the class of its options; empty without the package."""
    spec = find_spec("reasoning_gym")
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    found = {}
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        text = path.read_text("utf-8")
        own = _NAME.search(text)
        for made in _REGISTERED.finditer(text):
            if name := made[1] or (own and own[1]):
                found[name] = (path, made[2])
    return found


@cache
def options_of(name: str) -> frozenset[str]:
    """The options of a generator, except those that rollq sets; empty if its source does not list them."""
    path, options = generators()[name]
    classes = (node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.ClassDef))
    found = next((node for node in classes if node.name == options and not node.bases), None)
    fields = () if found is None else (node.target for node in found.body if isinstance(node, ast.AnnAssign))
    return frozenset(field.id for field in fields if isinstance(field, ast.Name)) - OURS


def problem_of(name: str, options: Collection[str]) -> str:
    """Why this generator does not exist or does not take these options; empty without the package."""
    if not (known := generators()):
        return ""
    if name not in known:
        hint = f"reasoning-gym has no generator {name!r}{_nearest(name, known)}"
        return f"env: {hint}; `rollq env list reasoning-gym` shows all names"
    taken = options_of(name)
    for key in sorted(set(options) - taken) if taken else ():
        allowed = f"{name} has {', '.join(sorted(taken))}"
        return f"env_options.{key}: unknown key{_nearest(key, taken)}; {allowed}"
    return ""


def check_right(name: str) -> None:
    """Raise `ConfigError` for a generator with a useless grader."""
    if name in WRONG:
        raise ConfigError(
            f'env = "reasoning-gym:{name}": its grader {WRONG[name]}: choose another generator, or set '
            "env_options.trust_graders = true"
        )


def _nearest(word: str, words: Collection[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
