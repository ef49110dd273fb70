"""GRPO with vLLM, in a worker's process and behind HTTP: producer, worker and trainer, new weights after every step,
under load."""

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from rollq.buffer.store.embedded_server import EmbeddedServer
from support.recorded_run import recompute_all, recorded_trainer, role
from support.vllm_run import ENGINE_ARGS, cpu_environment, free_port, make_qwen3
from support.vllm_server import VllmServer
from support.waiting import PATIENCE_S

STEPS = 6
CACHE_BYTES = ENGINE_ARGS["kv_cache_memory_bytes"]
JUDGE = "def reward(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n"
CONFIG = """
run = "vllm"

[tasks.parity]
prompts = "prompts.jsonl"
judge = "parity_judge.reward"
batch_groups = 4
group_size = 4
max_staleness = 1
staleness.stragglers = "expire"          # batches that wait for nobody: the next weights come in the middle of answers
staleness.partial_rollout = {partial}
rows.max_prompt_tokens = 400
max_tokens = 150
temperature = 0.7

[worker]
swap = "{mode}"
{engine}

[trainer]
model = "model"
output = "trainer"
steps = {steps}
learning_rate = 0.01
micro_batch_tokens = 4096
max_mismatch = 100.0
"""
IN_PROCESS = f"""
engine = "vllm"

[worker.options]
model = "model"
dtype = "float32"
engine_args = {{ enforce_eager = true, kv_cache_memory_bytes = {CACHE_BYTES}, max_num_seqs = 2 }}
"""
SERVED = """
engine = "openai"
tokenizer = "model"

[worker.options]
urls = ["{url}"]
push_model = "model"
"""


@pytest.mark.parametrize(
    ("mode", "partial", "served"),
    [
        pytest.param("wait", False, False, id="wait", marks=pytest.mark.slow),
        pytest.param("abort", True, False, id="abort", marks=pytest.mark.slow),
        pytest.param("keep", False, False, id="keep"),
        pytest.param("keep", False, True, id="keep-served", marks=pytest.mark.slow),
    ],
)
def test_every_token_that_vllm_made_has_the_logprob_of_the_weights_that_it_claims(
    mode: str, partial: bool, served: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    make_qwen3(folder / "model", seed=0)
    rng = np.random.default_rng(0)
    rows = [{"prompt": "".join(map(chr, rng.integers(97, 123, rng.integers(5, 350)))), "answer": ""} for _ in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "parity_judge.py").write_text(JUDGE)
    for name, value in cpu_environment().items():
        monkeypatch.setenv(name, value)
    with EmbeddedServer(tmp_path / "server") as server, ExitStack() as roles:
        engine = IN_PROCESS
        if served:
            vllm = VllmServer(folder / "model", free_port(), tmp_path / "vllm.log", "--max-num-seqs", "4")
            roles.enter_context(vllm).wait()
            engine = SERVED.format(url=vllm.url)
        config = CONFIG.format(mode=mode, partial=str(partial).lower(), steps=STEPS, engine=engine)
        (folder / "rollq.toml").write_text(config)
        monkeypatch.setenv("ROLLQ_REDIS_URL", server.url)
        roles.enter_context(role(folder, "produce", "rollq.toml"))
        roles.enter_context(role(folder, "work", "rollq.toml"))
        trainer = roles.enter_context(recorded_trainer(folder))
        assert trainer.wait(PATIENCE_S) == 0, (folder / "train-rollq.toml.log").read_text()

    seen = recompute_all(folder / "record", tolerance=1e-4)
    print(f"\nswap = {mode}: {seen.tokens} trained tokens recomputed, {seen.mixed} answers of several versions")
    assert len(list((folder / "record" / "batches").iterdir())) == STEPS
    assert seen.ages == {0, 1}
    assert (seen.mixed > 0) == (mode != "wait")
