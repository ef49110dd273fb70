"""The Python with verifiers: its command, its variables, and its version of verifiers."""

import os
import shutil
import sys
from collections.abc import Sequence
from typing import Final

import rollq
from rollq.buffer.errors import ConfigError
from rollq.environments.text.kind import version_of
from rollq.workers.judging.environment import known_to_be_harmless

VERSIONS: Final = ("0.4.", "verifiers>=0.4,<0.5")
"""The prefix of a supported version, and pip's requirement for it."""
MAIN: Final = (
    "import sys; sys.path.append(sys.argv[1]); from rollq.environments.verifiers.runner.__main__ import main; "
    "sys.path.remove(sys.argv.pop(1)); sys.exit(main(sys.argv[1:]))"
)
"""Hides the worker's packages."""


def require_verifiers(python: str) -> None:
    """Raise `ConfigError` unless this Python, or the worker's if empty, exists and has a supported verifiers."""
    used = python or sys.executable
    if shutil.which(used) is None:
        raise ConfigError(f'env_options.python = "{python}": no such program')
    version = version_of("verifiers", python)
    starts, asked = VERSIONS
    if not version.startswith(starts):
        has = f"has verifiers {version}" if version else "has no package verifiers"
        if not python:
            raise ConfigError(
                f"env_options.python is not set, and the worker's Python {has}: create an environment without torch "
                f'and vLLM, which may need other package versions, pip install "{asked}" there, and name its python'
            )
        raise ConfigError(f'env_options.python = "{python}" {has}: {python} -m pip install "{asked}"')


def command(python: str, *arguments: str) -> list[str]:
    """The command of a runner."""
    own = next(folder for folder in map(os.path.dirname, rollq.__path__) if _has_runner(folder))
    return [python or sys.executable, "-c", MAIN, own, *arguments]


def variables(named: Sequence[str]) -> dict[str, str]:
    """A runner's variables: harmless variables and `named` variables. The runner, and programs that verifiers starts,
    can import modules in the user's folders."""
    kept = known_to_be_harmless(os.environ, named)
    for name in ("PYTHONHOME", "VIRTUAL_ENV"):
        kept.pop(name, None)
    installed = (sys.prefix, sys.base_prefix)
    folders = [os.path.abspath(folder) for folder in sys.path if not folder.startswith(installed)]
    return kept | {"PYTHONPATH": os.pathsep.join(folders)}


def _has_runner(folder: str) -> bool:
    return os.path.isdir(os.path.join(folder, "rollq", "environments", "verifiers"))
