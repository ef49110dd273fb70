"""The kind `reasoning-gym`: rows of its generators, each with a separate seed, and the judge that scores them."""

import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, Final

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.environments.kinds import Finding
from rollq.environments.reasoning_gym.package import INSTALL, PACKAGE, check_right, installed, problem_of

JUDGE: Final = "rollq.environments.reasoning_gym.judge.JUDGE"
EXAMPLE_NAMES_S: Final = 120


class ReasoningGym:
    """See `Kind`."""

    def open(self, name: str, options: Mapping[str, Any], split: str, folder: Path = Path()) -> "Generator":
        """See `Kind.open`. The package checks options' values when it makes rows."""
        options = dict(options)
        seed = options.pop("seed", 0)
        trusted = options.pop("trust_graders", False)
        if type(seed) is not int:
            raise ConfigError(f"env_options.seed = {seed!r:.80}: must be a whole number")
        if not isinstance(trusted, bool):
            raise ConfigError(f"env_options.trust_graders = {trusted!r:.80}: must be true or false")
        if "size" in options:
            raise ConfigError("env_options.size: write rows, the number of rows")
        if problem := problem_of(name, options):
            raise ConfigError(problem)
        return Generator(name, options, split, seed, trusted)

    def installed(self) -> str:
        """See `Kind.installed`."""
        return installed()

    def install(self) -> str:
        """See `Kind.install`."""
        return INSTALL

    def names(self) -> Iterable[str]:
        """See `Kind.names`. Asks a child process, which takes seconds."""
        if not installed():
            return []
        show = "import rollq.environments.reasoning_gym.generators as e; print(*e.names())"
        environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""}
        command = [sys.executable, "-c", show]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=EXAMPLE_NAMES_S, check=True)
        return done.stdout.decode().split()


class Generator:
    """One generator: see `Source`. Row `i` has a seed drawn from (seed, split, i), so splits share no row by number."""

    def __init__(self, name: str, options: Mapping[str, Any], split: str, seed: int, trusted: bool) -> None:
        self.name = name
        self.options = exact_json.dumps(dict(sorted(options.items()))).decode()
        self._split = split
        self._seed = seed
        self._trusted = trusted

    def identity(self) -> dict[str, str]:
        """See `Source.identity`."""
        facts = {PACKAGE: installed(), "options": self.options, "split": self._split}
        return facts | {"seed": str(self._seed)}

    def rows(self) -> Iterator[dict[str, Any]]:
        """See `Source.rows`. Rows are unlimited."""
        from rollq.environments.reasoning_gym.generators import UnknownGenerator, entries

        try:
            for seed, entry in entries(self.name, self.options, map(self.row_seed, count())):
                yield {"prompt": entry["question"], "answer": entry["answer"], "env": {"seed": seed}}
        except UnknownGenerator as error:
            raise ConfigError(str(error)) from error

    def row_seed(self, row: int) -> int:
        """The seed of a row, 31 bits, the same on every machine."""
        drawn = blake2b(f"{self._seed}/{self._split}/{row}".encode(), digest_size=4).digest()
        return int.from_bytes(drawn) >> 1

    def settings(self) -> dict[str, Any]:
        """See `Source.settings`. Raises `ConfigError` for a grader that is known to be wrong, unless it is trusted."""
        if not self._trusted:
            check_right(self.name)
        options = {"generator": self.name, "options": exact_json.loads(self.options)}
        return {"judge": JUDGE, "judge_options": options | ({"trust_graders": True} if self._trusted else {})}

    def check(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
        """See `Source.check`."""
        from rollq.environments.reasoning_gym.checking import check

        return check(self.name, self.options, rows)
