"""The user's command is a real program: it reads the change, ends in time, and can hold nobody up."""

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError
from rollq.monitor.changes.command import Command
from support.waiting import PATIENCE_S, wait_until

FACTS = {"run": "sums", "before": "training", "state": "failing", "sentence": "naïve ‘judge’", "remedies": ["a", "b"]}
CAT = ("sh", "-c", "cat > seen.json")
HANG = ("sh", "-c", "echo $$ > pid; sleep 100000 & echo $! > child; wait")


def run(words: tuple[str, ...], folder: Path, longest_s: float = PATIENCE_S) -> str:
    return Command(words, folder, folder / "log", longest_s).run(FACTS, threading.Event())


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose end nobody has read does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def number_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_it_reads_the_change_as_json_in_the_folder_of_the_settings(tmp_path: Path) -> None:
    assert run(CAT, tmp_path) == ""
    assert json.loads((tmp_path / "seen.json").read_bytes()) == FACTS


def test_no_shell_reads_its_arguments(tmp_path: Path) -> None:
    assert run((sys.executable, "-c", "import sys; print(sys.argv[1])", "$(echo x); `y`"), tmp_path) == ""
    assert (tmp_path / "log").read_text() == "$(echo x); `y`\n"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("sh", "-c", "exit 7"), "ended with exit status 7"),
        (("sh", "-c", "kill -TERM $$"), "was killed by SIGTERM"),
        (("./missing",), "cannot be started: No such file or directory"),
        (("sh", "-c", "exec 0<&-; exit 0"), ""),
    ],
)
def test_its_end_is_put_in_words(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    assert run(words, tmp_path) == problem


def test_one_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    assert run(HANG, tmp_path, longest_s=1.0) == "was killed after 1 s"
    wait_until(lambda: not is_running(number_in(tmp_path / "pid")) and not is_running(number_in(tmp_path / "child")))


def test_one_that_runs_is_killed_when_the_watcher_ends(tmp_path: Path) -> None:
    stop, problems = threading.Event(), list[str]()
    thread = threading.Thread(target=lambda: problems.append(Command(HANG, tmp_path).run(FACTS, stop)))
    thread.start()
    child = number_in(tmp_path / "child")
    stop.set()
    thread.join()
    assert problems == ["was killed, because the watcher stops"]
    wait_until(lambda: not is_running(child))


def test_one_that_reads_nothing_holds_nobody_up_however_much_there_is_to_read(tmp_path: Path) -> None:
    facts = {**FACTS, "sentence": "x" * 1_000_000}
    assert Command(("true",), tmp_path).run(facts, threading.Event()) == ""


def test_what_it_leaves_running_on_purpose_stays(tmp_path: Path) -> None:
    assert run(("sh", "-c", "sleep 100000 & echo $! > child"), tmp_path) == ""
    child = number_in(tmp_path / "child")
    assert is_running(child)
    os.kill(child, 9)


def test_a_program_that_is_missing_is_refused_at_the_start(tmp_path: Path) -> None:
    Command(("true",), tmp_path).check()
    with pytest.raises(ConfigError, match=r"monitor\.on_change: 'no-such-program' is not a program on the PATH"):
        Command(("no-such-program", "token"), tmp_path).check()
    (tmp_path / "notify").write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="notify"):
        Command(("./notify",), tmp_path).check()
    (tmp_path / "notify").chmod(0o755)
    Command(("./notify",), tmp_path).check()
