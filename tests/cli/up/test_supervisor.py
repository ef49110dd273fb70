import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollq.buffer.errors import ConfigError
from rollq.cli.up.supervisor import MAX_RESTARTS, Role, RoleFailed, Supervisor, describe_exit
from support.waiting import wait_until

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
)
PARENT = """
import sys, time
from pathlib import Path
from rollq.cli.up.supervisor import Supervisor
with Supervisor(Path(sys.argv[1]), {}) as supervisor:
    role = supervisor.start("sleeper", ["/bin/sh", "-c", "sleep 600 & sleep 600"])
    print(supervisor.group, flush=True)
    time.sleep(600)
"""


def wait(role: Role) -> None:
    assert role.process is not None
    role.process.wait()


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_dead_role_is_started_again_and_told(tmp_path: Path) -> None:
    with Supervisor(tmp_path, os.environ) as supervisor:
        role = supervisor.start("sleeper", SLEEP)
        assert supervisor.restart_dead() == []
        assert role.process is not None
        first = role.process
        first.kill()
        first.wait()
        assert supervisor.restart_dead() == ["sleeper died (SIGKILL) and was restarted"]
        assert role.process.pid != first.pid


def test_roles_that_end_in_order_are_left_alone_and_only_one_that_finishes_has_finished(tmp_path: Path) -> None:
    with Supervisor(tmp_path, os.environ) as supervisor:
        trainer = supervisor.start("trainer", (sys.executable, "-c", ""), finishes=True)
        worker = supervisor.start("worker", (sys.executable, "-c", ""))
        wait(trainer)
        wait(worker)
        assert supervisor.restart_dead() == ["worker has stopped"]
        assert trainer.finished
        assert not worker.finished
        assert supervisor.restart_dead() == []


def test_a_role_that_keeps_dying_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    with Supervisor(tmp_path, os.environ, pause_s=0) as supervisor:
        role = supervisor.start("broken", (sys.executable, "-c", "raise SystemExit('no such model')"))
        for _ in range(MAX_RESTARTS):
            wait(role)
            supervisor.restart_dead()
        wait(role)
        with pytest.raises(RoleFailed, match=r"(?s)broken died 6 times.*exit status 1.*no such model"):
            supervisor.restart_dead()


def test_a_role_that_dies_again_waits_before_its_next_start(tmp_path: Path) -> None:
    with Supervisor(tmp_path, os.environ, pause_s=3600) as supervisor:
        role = supervisor.start("broken", (sys.executable, "-c", "raise SystemExit(1)"))
        wait(role)
        assert supervisor.restart_dead() == ["broken died (exit status 1) and was restarted"]
        wait(role)
        assert supervisor.restart_dead() == []
        assert role.restarts == 1


def test_a_role_that_refuses_its_settings_is_not_started_again(tmp_path: Path) -> None:
    with Supervisor(tmp_path, os.environ) as supervisor:
        wait(supervisor.start("picky", (sys.executable, "-c", "print('no such key'); raise SystemExit(2)")))
        with pytest.raises(ConfigError, match=r"(?s)picky refuses its settings; the end of .*no such key"):
            supervisor.restart_dead()


def test_stopping_kills_children_that_ignore_it_and_their_children(tmp_path: Path) -> None:
    with Supervisor(tmp_path, os.environ) as supervisor:
        role = supervisor.start("stubborn", STUBBORN)
        supervisor.start("parent", ["/bin/sh", "-c", "sleep 600 & sleep 600"])
        group = supervisor.group
        wait_until(lambda: "deaf" in supervisor.log(role).read_text())
    wait_until(lambda: not alive(group))


def test_children_and_grandchildren_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert alive(group)
        parent.kill()
    wait_until(lambda: not alive(group))


def test_exits_are_told_in_words() -> None:
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "SIGKILL"
