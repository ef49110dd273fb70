"""A demo's folder, made once for all test processes: the model takes a process that imports torch."""

import fcntl
import subprocess
import sys
from pathlib import Path

PREPARE = ("rollq", "demo", "--prepare", "--out", "sums")
"""The command that makes the folder, as README.md has it."""


def prepare_once(shared: Path) -> Path:
    """The folder `sums` in `shared`: settings, prompts, and a model that has learnt next to nothing."""
    folder = shared / "sums"
    with (shared / "sums.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "rollq.toml").exists():  # it is written last
            command = [sys.executable, "-m", "rollq.cli.main", *PREPARE[1:], "--warm-up-steps", "1"]
            subprocess.run(command, cwd=shared, check=True, stdout=subprocess.DEVNULL)
    return folder
