"""Experts end to end: a worker in bfloat16 records them, and the reference trainer in float32 replays them."""

import os
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.cli.settings.file import load_settings
from rollq.consumer import Batch, Consumer
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.ranks import Ranks
from support.consumer_groups import make_group, make_sample, make_segment
from support.forked_roles import role
from support.model_families import make_model
from support.waiting import PATIENCE_S

SETTINGS = """
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.math]
prompts = "prompts.jsonl"
rows.answer_field = ""
judge = "judges.parity"
batch_groups = 4
group_size = 2
max_staleness = 0
max_tokens = 48
[producer]
[worker]
engine = "transformers"
grace_s = 0
[worker.options]
model = "model"
device = "cpu"
dtype = "bfloat16"
return_routed_experts = true
[trainer]
model = "model"
output = "out"
steps = 1
replay_experts = true
timeout_s = {patience}
"""


@pytest.fixture
def folder(tmp_path: Path, server_url: str, run_name: str) -> Path:
    make_model(tmp_path / "model", "qwen3_moe", seed=0)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "some"}\n{"prompt": "other words"}\n{"prompt": "c"}\n')
    (tmp_path / "judges.py").write_text("def parity(prompt, sample):\n    return sum(map(ord, sample.text)) % 2\n")
    (tmp_path / "rollq.toml").write_text(SETTINGS.format(run=run_name, url=server_url, patience=PATIENCE_S))
    return tmp_path


def test_replay_brings_the_trainers_logprobs_closer_to_the_engines(
    folder: Path, server_url: str, run_name: str, buffer: Buffer
) -> None:
    config = load_settings(folder / "rollq.toml", {})
    settings = config.trainer
    assert settings is not None
    buffer.create_run()
    buffer.register_task("math", config.tasks["math"])
    with ExitStack() as stack:
        for name in ("produce", "work"):
            stack.enter_context(role(folder, name, "rollq.toml"))
        consumer = stack.enter_context(
            Consumer.connect(server_url, run=run_name, weights=settings.model, settings=settings.consumer())
        )
        batch = next(consumer)
        found = {
            replay: mean_mismatch(settings.model_copy(update={"replay_experts": replay}), batch)
            for replay in (False, True)
        }
        consumer.commit(batch)
    print(f"{found[False]:.4f} nats without replay, {found[True]:.4f} with; {describe(batch)}")
    assert found[True] < found[False]


def mean_mismatch(settings: TrainerSettings, batch: Batch) -> float:
    metrics = LossMetrics()
    assert Learner(settings, None, Ranks()).gradients(batch, metrics, None, threading.Event())
    total = metrics.mismatch.labelled(batch).total()
    assert total is not None
    return total.mean


def describe(batch: Batch) -> str:
    """How many bytes the experts are per token, and what part they are of the samples in the buffer."""
    tokens = sum(len(sequence.ids) for sequence in batch.sequences)
    experts = sum(sequence.arrays[ROUTED_EXPERTS].nbytes for sequence in batch.sequences)  # type: ignore[union-attr,misc]
    frames = sum(len(encode_samples([sample])) for sample in batch.samples)
    assert experts == tokens * 2 * 2, "2 layers, 2 experts per token, 1 byte each"
    return f"{experts // tokens} B of experts per token, {experts / frames:.0%} of {frames / tokens:.1f} B"


def test_the_whole_trainer_replays(folder: Path) -> None:
    with ExitStack() as stack:
        for name in ("produce", "work"):
            stack.enter_context(role(folder, name, "rollq.toml"))
        trainer = stack.enter_context(role(folder, "train", "rollq.toml"))
        trainer.join(PATIENCE_S)
        assert trainer.exitcode == 0, (folder / "train-rollq.toml.log").read_text()
    assert os.path.getsize(folder / "out" / "metrics.jsonl")


def test_a_model_without_experts_is_refused_at_the_start(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "llama", seed=0)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no experts.* \[trainer\] replay_experts = false"):
        Learner(TrainerSettings(model=model, output=tmp_path, steps=1, replay_experts=True), None, Ranks())


def test_a_batch_without_experts_names_the_setting_of_the_worker(folder: Path) -> None:
    learner = Learner(
        TrainerSettings(model=folder / "model", output=folder, steps=1, replay_experts=True), None, Ranks()
    )
    batch = Batch.build(1, [make_group(make_sample(make_segment([5], [6])))])
    with pytest.raises(InvalidGroup, match=r"no array 'routed_experts'.* return_routed_experts = true"):
        learner.gradients(batch, LossMetrics(), None, threading.Event())
