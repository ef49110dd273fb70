"""Ctrl-C on the terminal of a worker with vLLM reaches every process of it at once, vLLM's own too."""

import json
import os
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Status
from support.recorded_run import role, rollq
from support.vllm_run import ENGINE_ARGS, cpu_environment, make_qwen3
from support.waiting import PATIENCE_S

CACHE_BYTES = ENGINE_ARGS["kv_cache_memory_bytes"]
CONFIG = f"""
run = "interrupted"

[tasks.parity]
prompts = "prompts.jsonl"
judge = "exact_match"
batch_groups = 4
group_size = 2
max_tokens = 150

[worker]
engine = "vllm"
grace_s = {PATIENCE_S}

[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ enforce_eager = true, kv_cache_memory_bytes = {CACHE_BYTES}, max_num_seqs = 4 }}

[trainer]
model = "model"
output = "trainer"
steps = 100
"""
UNFINISHED = (Status.PENDING, Status.RUNNING, Status.ABORTED, Status.EXPIRED, Status.FAILED)


def test_ctrl_c_lets_the_groups_in_flight_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    make_qwen3(folder / "model", seed=0)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "a" * n, "answer": ""}) + "\n" for n in range(1, 65))
    )
    (folder / "rollq.toml").write_text(CONFIG)
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as stack:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        stack.enter_context(role(folder, "produce", "rollq.toml"))
        stack.enter_context(role(folder, "train", "rollq.toml"))
        log = stack.enter_context((tmp_path / "worker.log").open("wb"))
        worker = stack.enter_context(
            subprocess.Popen(rollq("work", "rollq.toml"), cwd=folder, stdout=log, stderr=log, process_group=0)
        )
        stack.callback(worker.kill)
        buffer = stack.enter_context(Buffer.connect(server.url, "interrupted"))
        with buffer.events() as events:
            while not any(report["tokens"] > 0 and report["in_flight"] for report in buffer.workers().values()):
                assert worker.poll() is None, (tmp_path / "worker.log").read_text()
                events.wait(0.5)
        family = psutil.Process(worker.pid).children(recursive=True)
        assert family, "vLLM has processes of its own"
        os.killpg(worker.pid, signal.SIGINT)
        assert worker.wait(PATIENCE_S) == 0, (tmp_path / "worker.log").read_text()
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
        admitted = int(buffer.counts("parity").progress["admitted"])
        groups = [buffer.inspect("parity", group_id) for group_id in range(1, admitted + 1)]
        unfinished = [group for group in groups if group["status"] in UNFINISHED]
        assert len(unfinished) < len(groups)
        assert all(group["attempt"] == "0" for group in unfinished), "what was begun was finished"
        assert buffer.workers() == {}
    said = (tmp_path / "worker.log").read_text()
    assert "Traceback" not in said, said
