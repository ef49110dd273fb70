import signal
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import StoreLost
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Status
from rollq.cli.run_location import open_run
from rollq.cli.settings.file import load_settings
from rollq.producer.prompt_records import check_prompts
from rollq.producer.prompts import PromptFile
from rollq.producer.sampler import Sampler

BATCH = 200


@pytest.fixture
def config(tmp_path: Path, server_url: str, run_name: str) -> Path:
    """A `rollq.toml` with one task of 300 prompts."""
    (tmp_path / "p.jsonl").write_bytes(
        b"".join(orjson.dumps({"prompt": str(i), "answer": i}) + b"\n" for i in range(300))
    )
    path = tmp_path / "rollq.toml"
    path.write_text(
        f'run = "{run_name}"\n[redis]\nbuffer_url = "{server_url}"\n'
        f'[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = {BATCH}\nmax_staleness = 3\n'
    )
    return path


def produce(config: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "rollq.cli.main", "produce", str(config), *options]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def wait_until_admitted(buffer: Buffer, groups: int) -> None:
    with buffer.events() as events:
        while "math" not in buffer.tasks() or buffer.counts("math").progress["admitted"] < groups:
            events.wait(0.2)


def begin(buffer: Buffer) -> None:
    buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri="none", digest="d")


def order(config: Path, n: int) -> list[str]:
    settings = load_settings(config, {})
    task = settings.tasks["math"]
    with PromptFile(task) as source:
        found = Sampler(source, (settings.seed,), task.max_bad_rows).prompts_from(0, n)
    return [str(prompt.content) for prompt, _ in found]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_producer_ends_cleanly_when_told_to(
    config: Path, server_url: str, run_name: str, number: signal.Signals
) -> None:
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        begin(buffer)
        process = produce(config, "--log-format", "json")
        wait_until_admitted(buffer, 4 * BATCH)
        process.send_signal(number)
        _, log = process.communicate()
        lines = [orjson.loads(line) for line in log.splitlines()]
        assert process.returncode == 0
        assert lines[-1]["message"] == "stopped"
        assert {line["level"] for line in lines} == {"info"}
        assert buffer.counts("math").statuses[Status.PENDING] == 4 * BATCH


@pytest.mark.long
def test_killed_producers_lose_and_repeat_no_prompt(config: Path, server_url: str, run_name: str) -> None:
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        begin(buffer)
        for admitted in (1, 300, 600):
            process = produce(config)
            wait_until_admitted(buffer, admitted)
            process.kill()
            process.communicate()
        pair = [produce(config), produce(config)]
        wait_until_admitted(buffer, 4 * BATCH)
        for process in pair:
            process.terminate()
            process.communicate()
        leases = buffer.lease(["math"], 1000, worker="w", version=0, epoch=1).leases
        assert [item.prompt.content for item in sorted(leases, key=lambda x: x.group_id)] == order(config, 4 * BATCH)


def test_a_flushed_server_ends_the_producer_with_status_1(
    config: Path, fresh_server: EmbeddedServer, run_name: str
) -> None:
    config.write_text(config.read_text().replace("buffer_url =", f'buffer_url = "{fresh_server.url}" #'))
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        buffer.create_run()
        begin(buffer)
        process = produce(config)
        wait_until_admitted(buffer, 4 * BATCH)
        buffer.client.flushall()
        _, log = process.communicate()
    assert process.returncode == 1
    assert "error: " in log.splitlines()[-1]


def test_other_rules_than_those_of_the_run_are_refused(config: Path, server_url: str, run_name: str) -> None:
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        buffer.register_task("math", load_settings(config, {}).tasks["math"])
    config.write_text(config.read_text() + "group_size = 3\n")
    process = produce(config)
    _, log = process.communicate()
    assert process.returncode == 2
    assert "group_size = 3, and the run has 8: it cannot change during a run, because" in log


def test_a_producer_that_is_refused_for_its_prompts_changes_no_rules(
    config: Path, server_url: str, run_name: str
) -> None:
    with Buffer.connect(server_url, run_name) as buffer:
        begin_with(config, buffer)
        (config.parent / "p.jsonl").write_text('{"prompt": "another", "answer": 1}\n')
        config.write_text(config.read_text().replace("max_staleness = 3", "max_staleness = 2"))
        process = produce(config)
        _, log = process.communicate()
        assert process.returncode == 2
        assert "tasks.math.prompts: " in log
        assert buffer.rules("math").max_staleness == 3


def begin_with(config: Path, buffer: Buffer) -> None:
    """Create the run that a settings file describes, with its prompts."""
    settings = load_settings(config, {})
    with open_run(settings, threading.Event()), PromptFile(settings.tasks["math"]) as file:
        check_prompts(buffer, "math", file, settings.seed)


def test_prompts_that_are_not_there_are_refused_before_anything_is_created(
    config: Path, server_url: str, run_name: str
) -> None:
    config.write_text(config.read_text().replace("p.jsonl", "q.jsonl"))
    process = produce(config)
    _, log = process.communicate()
    assert process.returncode == 2
    assert log.startswith("error: tasks.math: prompts = ")
    with Buffer.connect(server_url, run_name) as buffer, pytest.raises(StoreLost):
        buffer.tasks()


def test_the_embedded_server_serves_until_ctrl_c(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "rollq.cli.main", "redis", "--dir", str(tmp_path / "d"), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"serving at redis://127.0.0.1:{port}/0, data in ")
    with Buffer.connect(f"redis://127.0.0.1:{port}/0", "r") as buffer:
        buffer.create_run()
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 0


def test_an_order_of_ones_own_stands_beside_the_settings(
    config: Path, server_url: str, run_name: str, tmp_path: Path
) -> None:
    (tmp_path / "my_order.py").write_text(
        "import numpy as np\n"
        "class Backwards:\n"
        "    uses_stats = True\n"
        "    def __init__(self, task): pass\n"
        "    def pass_order(self, rows, seeds, number): return np.arange(rows)[::-1]\n"
        "    def takes(self, row, number, stats): return stats is None and row % 2 == 1\n"
    )
    config.write_text(config.read_text().replace("batch_groups = 200", "batch_groups = 2\ngroup_size = 1"))
    config.write_text(config.read_text() + 'curriculum.prompt_order = "my_order.Backwards"\n')
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        begin(buffer)
        process = produce(config)
        try:
            wait_until_admitted(buffer, 8)
        finally:
            process.terminate()
            process.communicate()
        rows = [int(buffer.inspect("math", group_id)["row"]) for group_id in range(1, 9)]
        assert rows == list(range(299, 283, -2))
        assert buffer.rules("math").prompt_stats


def test_prompts_that_cannot_be_used_end_the_producer_with_status_2(
    config: Path, server_url: str, run_name: str
) -> None:
    (config.parent / "p.jsonl").write_text('{"prompt": "a", "answer": 1}\n{}\n')
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
        begin(buffer)
        process = produce(config)
        _, log = process.communicate()
    assert process.returncode == 2
    assert "p.jsonl:2: no field 'prompt'" in log.splitlines()[-1]
