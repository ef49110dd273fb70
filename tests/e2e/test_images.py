"""Prompts with images end to end: producer, worker and trainer read the same files, once per group."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.forked_roles import role
from support.pictures import picture
from support.vision_families import make_vision_model
from support.waiting import PATIENCE_S

SETTINGS = """
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.look]
prompts = "prompts.jsonl"
rows.answer_field = ""
rows.chat = true
judge = "judges.parity"
batch_groups = 3
group_size = 2
max_staleness = 0
max_tokens = 24
[producer]
[worker]
engine = "transformers"
grace_s = 0
[worker.options]
model = "model"
device = "cpu"
[trainer]
model = "model"
output = "out"
steps = 3
layout = "padded"
learning_rate = 0.001
max_mismatch = 0.0001
timeout_s = {patience}
"""


@pytest.fixture
def folder(tmp_path: Path, server_url: str, run_name: str) -> Path:
    make_vision_model(tmp_path / "model", "gemma3", seed=0)
    small, large = "small.png", "large.png"
    (tmp_path / small).write_bytes(picture(4, 4, seed=1))
    (tmp_path / large).write_bytes(picture(80, 40, seed=2))
    assert (tmp_path / small).stat().st_size < 500 < (tmp_path / large).stat().st_size
    rows = [
        {"prompt": "what is this?", "images": small},
        {"prompt": "<image> is not <image>: why?", "images": [large, {"path": small}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": large}, {"type": "text", "text": "?"}]}]},
        {"prompt": "no image"},
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "judges.py").write_text("def parity(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n")
    (tmp_path / "rollq.toml").write_text(SETTINGS.format(run=run_name, url=server_url, patience=PATIENCE_S))
    return tmp_path


def test_a_model_learns_from_images_on_exact_logprobs(folder: Path) -> None:
    """`max_mismatch` ends the trainer if its logprobs are not the engine's, also after swaps."""
    with ExitStack() as stack:
        for name in ("produce", "work"):
            stack.enter_context(role(folder, name, "rollq.toml"))
        trainer = stack.enter_context(role(folder, "train", "rollq.toml"))
        trainer.join(PATIENCE_S)
        assert trainer.exitcode == 0, (folder / "train-rollq.toml.log").read_text()
    metrics = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    print([one["mismatch"]["mean"] for one in metrics])
    assert len(metrics) == 3
