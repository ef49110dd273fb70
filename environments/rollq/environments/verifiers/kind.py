"""The kind `verifiers`, named by a task set."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from rollq.buffer.common import exact_json
from rollq.buffer.rules.settings import Settings
from rollq.environments.kinds import Finding, Level
from rollq.environments.options import read_options
from rollq.environments.text.kind import python_in, version_of
from rollq.environments.verifiers.checking import TRIED, findings
from rollq.environments.verifiers.exported import written
from rollq.environments.verifiers.other_python import require_verifiers

LOOP = "rollq.environments.verifiers.loop.verifiers_loop"
JUDGE = "rollq.environments.verifiers.loop.unrewarded"


class VerifiersOptions(Settings):
    """`env_options`."""

    python: str = Field(default="", description="Python interpreter that has verifiers; default: the worker's")
    harness: str = Field(
        default="inside",
        description="inside: chat and tools in the runner; or a harness of verifiers; empty: the task set's",
    )
    config: dict[str, Any] = Field(default_factory=dict, description="keys of verifiers' EnvConfig")
    runners: int = Field(default=2, ge=0, description="processes of one worker; 0: you start them")
    concurrent: int = Field(default=64, gt=0, description="concurrent episodes in one worker")
    environment: tuple[str, ...] = Field(default=(), description="environment variables of the worker that runners get")


class Verifiers:
    """See `Kind`."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> "TaskSet":
        """A task set; nothing is imported. Raises `ConfigError`."""
        given = read_options(VerifiersOptions, options)
        return TaskSet(name, given.model_copy(update={"python": python_in(folder, given.python)}), split)

    def installed(self) -> str:
        """Return "built in": without options, the Python with verifiers is unknown."""
        return "built in"

    def install(self) -> str:
        """How to install the kind's requirements."""
        return "python3 -m venv .venv-verifiers; .venv-verifiers/bin/pip install 'verifiers>=0.4,<0.5'"

    def names(self) -> Iterable[str]:
        """Only the other Python knows the task sets."""
        return ()


class TaskSet:
    """One task set of verifiers: see `Source`."""

    def __init__(self, name: str, options: VerifiersOptions, split: str) -> None:
        self.name, self.options, self.split = name, options, split

    def spec(self) -> dict[str, Any]:
        """The specification with which a runner opens the task set."""
        return {
            "taskset": self.name,
            "config": self.options.config,
            "harness": self.options.harness,
            "split": self.split,
        }

    def identity(self) -> dict[str, str]:
        """See `Source.identity`."""
        package = self.name.rpartition("/")[2].partition("@")[0]
        python = self.options.python
        return {
            "verifiers": version_of("verifiers", python),
            "package": package,
            "version": version_of(package, python),
            "config": exact_json.dumps(self.options.config).decode(),
            "split": self.split,
        }

    def rows(self) -> Iterator[dict[str, Any]]:
        """A row for each task. Raises `ConfigError`."""
        require_verifiers(self.options.python)
        return self._written("--rows")

    def settings(self) -> dict[str, Any]:
        """The loop with sessions for runners, which set the reward."""
        options = self.options
        return {
            "answer_field": "",
            "judge": JUDGE,
            "agent_loop": LOOP,
            "agent_options": {
                "environment": self.spec(),
                "python": options.python,
                "runners": options.runners,
                "concurrent": options.concurrent,
                "variables": list(options.environment),
            },
        }

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """Play episodes of the first rows with a model that answers "0". The episodes must have rewards and leave
        nothing behind."""
        require_verifiers(self.options.python)
        yield from findings(self._written("--try", rows=[dict(row) for row in rows[:TRIED]]))
        if not version_of(self.name, self.options.python):
            yield Finding(
                Level.NOTE, "the task set is not in an installed package: only different rows reveal a change"
            )

    def _written(self, what: str, **asked: Any) -> Iterator[dict[str, Any]]:
        return written(what, {"spec": self.spec(), **asked}, self.options.python, self.options.environment)
