"""`rollq top` in a real terminal, on a real server."""

import os
import re
import signal
import subprocess
import sys

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.history import HISTORY_COUNTERS
from rollq.buffer.values.rollouts import Status
from rollq.cli.top.app import COLOURS
from rollq.monitor.status.diagnosis import Level, State
from support.buffer_run import World
from support.terminal import Terminal, terminal
from support.waiting import PATIENCE_S, wait_until

SIZES = [(80, 24), (120, 40)]
REPORT = {
    "engine": "simulated",
    "state": "serving",
    "in_flight": 3,
    "samples_in_flight": 24,
    "capacity": 64,
    "tokens_per_s": 512.0,
    "groups": 40,
}


def command(url: str, run: str) -> list[str]:
    return [sys.executable, "-m", "rollq.cli.main", "top", "--url", url, "--run", run]


def ends(shown: Terminal) -> None:
    assert shown.process.wait(PATIENCE_S) == 0


def keys_work(shown: Terminal) -> None:
    shown.press("?")
    shown.wait_for("Tab        tasks, workers")
    shown.press("escape")
    wait_until(lambda: "Tab        tasks" not in shown.text(), otherwise=shown.text)
    shown.press("q")
    ends(shown)


def started(buffer: Buffer, *, workers: int = 2) -> World:
    world = World(buffer).start(math={}, code={})
    world.complete(3)
    world.admit(2, "code")
    statuses, counters = ["0"] * len(Status), ["0"] * len(HISTORY_COUNTERS)
    for at_s, ready in ((1000, 4), (1010, 8)):
        row = ",".join([f"{at_s * 1000},1,0,{ready}", *statuses, *counters])
        buffer.client.rpush(task_keys(buffer.run, "code").prefix + "history", row)
    report(buffer, workers)
    return world


def report(buffer: Buffer, workers: int) -> None:
    for number in range(workers):
        buffer.report_worker(f"worker-{number}", {**REPORT, "groups": 40 + number})


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_run_is_shown_and_followed(buffer: Buffer, server_url: str, width: int, height: int) -> None:
    world = started(buffer)
    with terminal(command(server_url, buffer.run), width, height) as shown:
        text = shown.wait_for("worker-0", "worker-1", "math", "code", "ready groups", "tokens/s", "q quit")
        lines = text.splitlines()
        assert lines[0].startswith(tuple(f"{state}: " for state in State))
        assert "▄█ 8.0" in next(line for line in lines if line.startswith("ready groups"))
        assert "3/2" in next(line for line in lines if line.lstrip().startswith("math"))
        assert "24/64" in next(line for line in lines if line.lstrip().startswith("worker-0"))
        assert all(len(line) <= width for line in lines)
        world.complete(1)
        buffer.report_worker("worker-2", REPORT)
        shown.wait_for("4/2", "worker-2")
        shown.press("q")
        ends(shown)


def test_a_task_is_paused_and_resumed_after_a_question_that_says_what_will_change(
    buffer: Buffer, server_url: str
) -> None:
    started(buffer)
    with terminal(command(server_url, buffer.run), 80, 24) as shown:
        shown.wait_for("worker-1")
        shown.press("down", "p")
        shown.wait_for("Pause task math?", "run -> pause", "y: yes")
        shown.press("n")
        wait_until(lambda: "Pause task" not in shown.text(), otherwise=shown.text)
        assert buffer.clock("math").control is Control.RUN
        shown.press("p")
        shown.wait_for("Pause task math?")
        shown.press("y")
        shown.wait_for("task math: run -> pause")
        assert (buffer.clock("math").control, buffer.clock("code").control) == (Control.PAUSE, Control.RUN)
        shown.press("p")
        shown.wait_for("Nothing changes: it is already paused", "Esc: back")
        shown.press("y", "r")
        shown.wait_for("Resume task math?", "pause -> run")
        shown.press("y")
        shown.wait_for("task math: pause -> run")
        assert buffer.clock("math").control is Control.RUN
        shown.press("q")
        ends(shown)


def test_groups_are_found_and_moved_after_a_question(buffer: Buffer, server_url: str) -> None:
    world = started(buffer)
    buffer.order_group("math", 3, GroupOrder.QUARANTINE)
    with terminal(command(server_url, buffer.run), 120, 40) as shown:
        shown.wait_for("worker-1")
        shown.press("f")
        shown.wait_for("Find groups", "1 group", "math/3", "quarantined by hand")
        shown.press("r")
        shown.wait_for("Requeue 1 group?", "requeue: 1 failed")
        shown.press("n")
        wait_until(lambda: "Requeue 1 group?" not in shown.text(), otherwise=shown.text)
        assert buffer.counts("math").statuses[Status.FAILED] == 1
        shown.press("r")
        shown.wait_for("Requeue 1 group?")
        shown.press("y")
        shown.wait_for("done: requeue: 1 failed; 0 groups")
        assert buffer.counts("math").statuses[Status.PENDING] == 1
        shown.press("escape")
        wait_until(lambda: "Find groups" not in shown.text(), otherwise=shown.text)
        shown.press("q")
        ends(shown)
    world.check()


def test_the_selected_worker_is_drained_also_after_it_has_moved(buffer: Buffer, server_url: str) -> None:
    started(buffer)
    with terminal(command(server_url, buffer.run), 120, 40) as shown:
        shown.wait_for("worker-1")
        shown.press("tab", "down")
        buffer.report_worker("a-worker-before-them", REPORT)
        shown.wait_for("a-worker-before-them")
        shown.press("d")
        shown.wait_for("Drain worker worker-1?", "3 groups")
        shown.press("y")
        shown.wait_for("worker worker-1: drain")
        assert buffer.report_worker("worker-1", REPORT).value == "drain"
        assert buffer.report_worker("worker-0", REPORT).value == "run"
        shown.press("q")
        ends(shown)


def test_workers_are_sorted_by_a_column_in_both_orders(buffer: Buffer, server_url: str) -> None:
    started(buffer, workers=3)

    def order(text: str) -> list[str]:
        report(buffer, 3)  # again: silent workers leave the view
        return [line.split()[0] for line in text.splitlines() if line.lstrip().startswith("worker-")]

    with terminal(command(server_url, buffer.run), 120, 40) as shown:
        shown.wait_for("worker-2")
        shown.press("s", "S")
        shown.wait_for("worker▼")
        wait_until(lambda: order(shown.text()) == ["worker-2", "worker-1", "worker-0"], otherwise=shown.text)
        shown.press("S")
        wait_until(lambda: order(shown.text()) == ["worker-0", "worker-1", "worker-2"], otherwise=shown.text)
        keys_work(shown)


def test_a_server_that_hangs_or_goes_away_never_blocks_the_keys(fresh_server: EmbeddedServer) -> None:
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        started(buffer)
    with terminal(command(fresh_server.url, "sums"), 80, 24) as shown:
        shown.wait_for("worker-1")
        pid = fresh_server.client().info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: bool(re.search(r"^([4-9]\.\d|\d\d+) s old", shown.text(), re.M)), otherwise=shown.text)
            keys_work(shown)
        finally:
            os.kill(pid, signal.SIGCONT)


def test_a_run_that_is_not_there_yet_appears(fresh_server: EmbeddedServer) -> None:
    with terminal(command(fresh_server.url, "sums"), 80, 24) as shown:
        shown.wait_for("sums", "q quit")
        with Buffer.connect(fresh_server.url, "sums") as buffer:
            started(buffer)
        shown.wait_for("worker-1")
        fresh_server.stop()
        shown.wait_for("no answer")
        shown.press("ctrl+c")
        ends(shown)


def test_it_ends_with_a_terminal_that_vanishes_without_a_hangup(server_url: str) -> None:
    with terminal(command(server_url, "sums"), 80, 24) as shown:
        shown.wait_for("q quit")
        shown.close()
        ends(shown)


def test_without_a_terminal_it_names_the_other_command(server_url: str) -> None:
    done = subprocess.run(command(server_url, "sums"), capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert done.stderr == "error: `rollq top` needs a terminal: use `rollq status` elsewhere\n"


def test_each_level_has_a_colour() -> None:
    assert set(COLOURS) == set(Level)
