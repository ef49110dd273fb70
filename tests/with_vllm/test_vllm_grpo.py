"""GRPO with vLLM in a worker's process: producer, worker and trainer, new weights after every step, under load."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from recorded_run import recompute_all, role
from vllm_world import ENGINE_ARGS, cpu_environment, make_qwen3

from rollq.buffer.server import EmbeddedServer

STEPS = 6
JUDGE = "def reward(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n"
CONFIG = """
run = "vllm"

[tasks.parity]
prompts = "prompts.jsonl"
judge = "parity_judge.reward"
batch_groups = 4
group_size = 4
max_staleness = 1
stragglers = "expire"          # batches that wait for nobody: the next weights come in the middle of answers
partial_rollout = {partial}
max_prompt_tokens = 400
max_tokens = 150
temperature = 0.7

[worker]
engine = "vllm"
swap = "{mode}"

[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ enforce_eager = true, kv_cache_memory_bytes = {cache}, max_num_seqs = 4 }}

[trainer]
model = "model"
output = "trainer"
steps = {steps}
learning_rate = 0.01
micro_batch_tokens = 4096
record_dir = "record"
verify_logprobs = 1e-4
"""


@pytest.mark.parametrize(
    ("mode", "partial"), [("wait", False), ("abort", True), ("keep", False)], ids=["wait", "abort", "keep"]
)
def test_every_token_that_vllm_made_has_the_logprob_of_the_weights_that_it_claims(
    mode: str, partial: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    make_qwen3(folder / "model", seed=0)
    rng = np.random.default_rng(0)
    rows = [{"prompt": "".join(map(chr, rng.integers(97, 123, rng.integers(5, 350)))), "answer": ""} for _ in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parity_judge.py").write_text(JUDGE)
    config = CONFIG.format(
        mode=mode, partial=str(partial).lower(), steps=STEPS, cache=ENGINE_ARGS["kv_cache_memory_bytes"]
    )
    (folder / "rollq.toml").write_text(config)
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as roles:
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        roles.enter_context(role(folder, "produce", "rollq.toml"))
        roles.enter_context(role(folder, "work", "rollq.toml"))
        trainer = roles.enter_context(role(folder, "train", "rollq.toml"))
        assert trainer.wait(200) == 0, (folder / "train-rollq.toml.log").read_text()

    seen = recompute_all(folder / "record", tolerance=1e-4)
    print(f"\nswap = {mode}: {seen.tokens} trained tokens recomputed, {seen.mixed} answers of several versions")
    assert len(list((folder / "record" / "batches").iterdir())) == STEPS
    assert seen.ages == {0, 1}
    assert (seen.mixed > 0) == (mode != "wait")
