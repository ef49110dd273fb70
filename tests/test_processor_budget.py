"""The budget of `make test`: a run that takes more processor seconds fails, though all of its tests pass."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.long
@pytest.mark.parametrize(("limit_s", "status", "shown"), [(0, 1, "EXCEEDED: "), (10_000, 0, "")])
def test_a_run_fails_if_it_takes_more_processor_seconds(limit_s: int, status: int, shown: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "1",
        f"--processor-budget={limit_s}",
        "tests/buffer/test_splitmix.py",
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == status, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if "processor seconds of" in line]
    used, words, limit = line.removeprefix(shown).partition(" processor seconds of ")
    assert int(used) > 0
    assert words
    assert limit.startswith(f"{limit_s} ")
