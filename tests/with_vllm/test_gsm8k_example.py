"""The example's own files, with a tiny model on the CPU in place of Qwen3-0.6B on a GPU."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.vllm_run import ENGINE_ARGS, cpu_environment, make_qwen3
from support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"
STEPS = 3
EDITS = {
    'device = "cuda"': 'device = "cpu"',
    'dtype = "bfloat16"': 'dtype = "float32"',
    "gpu_memory_utilization = 0.45": "\n".join(f"{name} = {json.dumps(value)}" for name, value in ENGINE_ARGS.items()),
    "batch_groups = 32": "batch_groups = 4",
    "max_tokens = 1024\n": "max_tokens = 48\n",
    "steps = 300": f"steps = {STEPS}",
    "checkpoint_every = 20": "checkpoint_every = 1",
    'filters = ["zero_advantage"]': "filters = []",  # a random model is never right
    "min_keep_rate = 0.02": "min_keep_rate = 0.0",
}


def write_questions(path: Path) -> None:
    """The real ones where they lie beside the project, else some of the same form."""
    if GSM8K.exists():
        lines = GSM8K.read_text("utf-8").splitlines()[:64]
    else:
        lines = [
            json.dumps({"question": f"Ann has {n} eggs and buys {n} more. How many?", "answer": f"#### {2 * n}"})
            for n in range(64)
        ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_example_runs_with_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gsm8k"
    shutil.copytree(ROOT / "examples" / "gsm8k", folder)
    make_qwen3(folder / "Qwen3-0.6B", seed=0, max_position_embeddings=2048)
    write_questions(folder / "gsm8k_train.jsonl")
    config = (folder / "rollq.toml").read_text("utf-8")
    for old, new in EDITS.items():
        assert old in config, old
        config = config.replace(old, new)
    (folder / "rollq.toml").write_text(config, "utf-8")
    port = free_port()
    script = (folder / "run.sh").read_text("utf-8").replace("--dir redis", f"--dir redis --port {port}")
    (folder / "run.sh").write_text(script, "utf-8")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **cpu_environment(), "PATH": path, "ROLLQ_REDIS_URL": f"redis://127.0.0.1:{port}/0"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(["./run.sh"], cwd=folder, env=environment, stdout=log, stderr=log, process_group=0) as run,
    ):
        try:
            assert run.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
    metrics = [json.loads(line) for line in (folder / "output" / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert all(line["groups"] == 4 and line["samples"] == 32 for line in metrics)
    assert "Traceback" not in (tmp_path / "log").read_text()
