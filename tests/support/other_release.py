"""Another release of rollq: a copy of `rollq.buffer` with another function, whose roles are processes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import rollq.buffer
from support.documented_commands import ROOT

MARK = "created_by"
"""The field with which the other release marks runs that it creates."""


class OtherRole:
    """A running role: see `support.other_role`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def answer(self) -> str:
        """The next line of its output."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __call__(self, *words: str) -> list[str]:
        """Have it make moves; returns its answers."""
        return [self._move(word) for word in words]

    def _move(self, word: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self.answer()


class OtherRelease:
    """A release in `folder` with the schema of this one, or with `schema`."""

    def __init__(self, folder: Path, schema: int | None = None) -> None:
        package = folder / "rollq" / "buffer"
        shutil.copytree(Path(rollq.buffer.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
        _replace(package / "lua" / "run" / "create_run.lua", "'created_ms',", f"'{MARK}', 'another', 'created_ms',")
        if schema is not None:
            _replace(package / "store" / "keys.py", r"SCHEMA_VERSION = \d+", f"SCHEMA_VERSION = {schema}")
        others = ("producer", "workers", "consumer", "monitor", "environments", "cli", "integrations", "tests")
        folders = [folder, *(ROOT / name for name in others)]
        given = {name: value for name, value in os.environ.items() if not name.startswith("ROLLQ_")}
        self._environment = given | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        self.digest = self.python("from rollq.buffer.store.library import digest; print(digest())").strip()

    def python(self, code: str) -> str:
        """Run Python code with this release, and return its output."""
        return self._run("-c", code)

    def rollq(self, *arguments: object, **environment: str) -> str:
        """Run a command of this release, and return its output. It must succeed."""
        return self._run("-c", "from rollq.cli.main import main; main()", *map(str, arguments), **environment)

    def _run(self, *arguments: str, **environment: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.check_output(command, env=self._environment | environment, text=True)

    @contextmanager
    def role(self, url: str, run: str, password: str = "") -> Iterator[OtherRole]:
        """A role of this release, connected to a run."""
        environment = self._environment | ({"ROLE_PASSWORD": password} if password else {})
        process = subprocess.Popen(
            [sys.executable, "-m", "support.other_role", url, run],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            role = OtherRole(process)
            assert role.answer() == "done"
            yield role


def _replace(path: Path, pattern: str, replacement: str) -> None:
    text, count = re.subn(pattern, replacement, path.read_text())
    assert count == 1, f"{path} has {pattern} {count} times"
    path.write_text(text)
