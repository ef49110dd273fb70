"""Whatever is killed at whatever stage of a swap: the run continues, no group is lost, and every trained token is of
the weights that it claims.

`make kills` kills every process at every stage; by default four are killed.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Status
from rollq.workers.engines.vllm.watchdog import VARIABLE
from support.invariants import check_task
from support.recorded_run import recompute_all, recorded_trainer, role
from support.staged_worker import RESTART_STAGES, STAGES, VICTIMS
from support.vllm_run import ENGINE_ARGS, TOLERANCE, cpu_environment, make_qwen3
from support.waiting import PATIENCE_S, wait_while_alive

CACHE_BYTES = ENGINE_ARGS["kv_cache_memory_bytes"]
JUDGE = "def reward(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n"
CONFIG = """
run = "killed"

[tasks.parity]
prompts = "prompts.jsonl"
judge = "parity_judge.reward"
batch_groups = 4
group_size = 2
max_staleness = 8
staleness.sync_weights_interval = {interval}
limits.max_tries = 50
limits.max_deaths = 50
limits.lease_s = 5
rows.max_prompt_tokens = 100
max_tokens = 24

[worker]
engine = "vllm"
swap = "{swap}"
engine_restarts = 50

[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ enforce_eager = true, kv_cache_memory_bytes = {cache_bytes}, max_num_seqs = 4, \
tensor_parallel_size = 2, distributed_executor_backend = "mp" }}

[trainer]
model = "model"
output = "trainer"
steps = 1000
transport = "path"
learning_rate = 0.001
"""
INTERVALS = {"keep": 1, "restart": 4}
"""Steps between two publications. A start takes long on a busy machine."""
KILLS = {
    "keep": ("load/engine worker", "score/core", "resume/worker"),
    "restart": ("start/core",),
}
ALL_KILLS = {
    "keep": [f"{stage}/{victim}" for stage, victim in product(STAGES, VICTIMS)],
    "restart": [f"{stage}/{victim}" for stage, victim in product(RESTART_STAGES, VICTIMS)],
}


@contextmanager
def staged_worker(folder: Path, pairs: Sequence[str]) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "work-rollq.toml.log").open("ab") as log:
        command = [sys.executable, "-m", "support.staged_worker", "rollq.toml", *pairs]
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def vllm_processes(worker: int) -> list[psutil.Process]:
    """The processes of the worker's vLLM, which it has marked."""

    def is_marked(process: psutil.Process) -> bool:
        try:
            return VARIABLE in process.environ()
        except psutil.Error:
            return False

    return [child for child in psutil.Process(worker).children(recursive=True) if is_marked(child)]


@pytest.mark.slow  # whole runs; test_engine.py and test_servers.py kill processes outside of swaps
@pytest.mark.parametrize("swap", KILLS)
def test_a_process_that_is_killed_in_a_swap_costs_no_group(
    swap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = (ALL_KILLS if os.environ.get("ROLLQ_KILLS") == "all" else KILLS)[swap]
    make_qwen3(tmp_path / "model", seed=0)
    (tmp_path / "parity_judge.py").write_text(JUDGE)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{n}", "answer": ""}}\n' for n in range(64)))
    (tmp_path / "rollq.toml").write_text(CONFIG.format(swap=swap, interval=INTERVALS[swap], cache_bytes=CACHE_BYTES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as stack:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        others = {
            "produce": stack.enter_context(role(tmp_path, "produce", "rollq.toml")),
            "train": stack.enter_context(recorded_trainer(tmp_path)),
        }
        worker = stack.enter_context(staged_worker(tmp_path, kills))
        buffer = stack.enter_context(Buffer.connect(server.url, "killed"))
        for number, kill in enumerate(kills):
            pid = until_frozen(tmp_path, kill, {**others, "work": worker})
            family = vllm_processes(worker.pid)
            os.kill(pid, signal.SIGKILL)
            assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == [], kill
            if kill.endswith("/worker"):
                worker.wait(PATIENCE_S)
                worker = stack.enter_context(staged_worker(tmp_path, kills[number + 1 :]))
            print(f"{swap}: {kill}: nothing is left")
        step = buffer.clock("parity").step
        processes = {**others, "work": worker}
        wait_while_alive(lambda: buffer.clock("parity").step >= step + 3, processes, partial(output, tmp_path))
        check_task(buffer, "parity")
        assert buffer.counts("parity").statuses[Status.FAILED] == 0
    seen = recompute_all(tmp_path / "record", TOLERANCE)
    print(f"{swap}: {seen.tokens} trained tokens, all of the weights that they claim")


def until_frozen(folder: Path, pair: str, processes: Mapping[str, "subprocess.Popen[bytes]"]) -> int:
    """Wait until the victim is frozen; returns its process id."""

    def found() -> re.Match[str] | None:
        return re.search(rf"^frozen: {pair} (\d+)$", output(folder, "work"), re.M)

    wait_while_alive(lambda: found() is not None, processes, partial(output, folder))
    match = found()
    assert match is not None
    return int(match[1])


def output(folder: Path, name: str) -> str:
    return (folder / f"{name}-rollq.toml.log").read_text(errors="replace")
