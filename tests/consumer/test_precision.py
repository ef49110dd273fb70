"""What a step trains: float32 numbers, whatever passes compute in, and how many of them it has changed."""

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollq.consumer import Batch
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.precision import computing_in
from rollq.consumer.settings import LoraSettings, TrainerSettings
from rollq.consumer.trainer.checkpoints import newest_checkpoint
from rollq.consumer.trainer.learner import Learner, start_learner
from rollq.consumer.trainer.metrics_files import METRICS_FILE
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.reports import reporting
from rollq.consumer.trainer.trainer import Trainer
from support.consumer_groups import VOCABULARY, make_group, make_sample, make_segment
from support.tiny_qwen3 import tiny_qwen3


class Recorded:
    """The same groups in each step, and no server."""

    epoch, lineage, replayed_through, sync_weights_interval = 0, "lineage", 0, 1

    def __init__(self, step: int, groups: Callable[[int], Batch]) -> None:
        self.step, self._groups = step, groups

    def __next__(self) -> Batch:
        return self._groups(self.step)

    def commit(self, batch: Batch) -> None:
        self.step = batch.step + 1

    def saving(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self, *_: object, **__: object) -> int:
        return 0

    def checkpoint(self, step: int) -> None:
        pass

    def annotate(self, *_: object) -> None:
        pass

    def report(self, facts: object) -> None:
        pass

    def take_production(self) -> dict[str, Any]:
        return {}

    def evaluate(self, **_: object) -> dict[str, Any]:
        return {}


def batch_of(step: int, *, equal: bool = False) -> Batch:
    draws = np.random.default_rng(step)
    groups = []
    for number in range(4):
        samples = [
            make_sample(
                make_segment([1, 2, 3], draws.integers(1, VOCABULARY, 4 + 3 * number).tolist()),
                reward=1.0 if equal else float(index),
            )
            for index in range(3)
        ]
        groups.append(make_group(*samples, group_id=number))
    return Batch.build(step, groups)


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerSettings]:
    def make(**changed: object) -> TrainerSettings:
        values = {"model": model_folder, "output": tmp_path / "out", "steps": 3, "max_mismatch": None}
        return TrainerSettings.model_validate({**values, "threads": 1, **changed})

    return make


def train(chosen: TrainerSettings, batch: Callable[[int], Batch] = batch_of) -> list[dict[str, Any]]:
    """Train to the end; returns the lines of metrics."""
    chosen.output.mkdir(exist_ok=True)
    checkpoint, learner = start_learner(chosen, 0, Ranks())
    source: Any = Recorded(1 if checkpoint is None else checkpoint.step + 1, batch)
    with reporting(source, "run", chosen, Ranks(), 0) as reports:
        Trainer(source, learner, chosen, Ranks(), threading.Event(), reports).run()
    return [orjson.loads(line) for line in (chosen.output / METRICS_FILE).read_bytes().splitlines()]


def weights_of(output: Path) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(output)
    assert newest is not None
    name = (
        "adapter_model.safetensors" if (newest.folder / "adapter_model.safetensors").exists() else "model.safetensors"
    )
    found: dict[str, torch.Tensor] = load_file(newest.folder / name)
    return found


@pytest.mark.parametrize("precision", [{"dtype": "bfloat16"}, {"compute_dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("more", [{}, {"updates_per_batch": 2}, {"lora": {"rank": 2}}], ids=str)
def test_small_updates_add_up_whatever_passes_compute_in(
    settings: Callable[..., TrainerSettings], tmp_path: Path, precision: dict[str, str], more: dict[str, Any]
) -> None:
    lines = {}
    for name, dtypes in (("float32", {}), ("bfloat16", precision)):
        lines[name] = train(settings(output=tmp_path / name, learning_rate=1e-6, steps=5, **dtypes, **more))
    assert all(line["changed"] > 0.95 for line in lines["bfloat16"][1:])
    exact, found = weights_of(tmp_path / "float32"), weights_of(tmp_path / "bfloat16")
    start = dict(tiny_qwen3().named_parameters())
    for name, weights in found.items():
        assert weights.dtype == torch.float32
        if name in start:
            moved, expected = weights - start[name].detach(), exact[name] - start[name].detach()
            assert torch.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.9, name


@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_a_run_resumes_in_another_dtype_without_losing_an_update(
    settings: Callable[..., TrainerSettings], tmp_path: Path, first: str
) -> None:
    train(settings(dtype=first, learning_rate=1e-6, steps=3))
    saved = weights_of(tmp_path / "out")
    other = "bfloat16" if first == "float32" else "float32"
    _, learner = start_learner(settings(dtype=other, steps=9), 0, Ranks())
    for name, parameter in learner.model.named_parameters():
        assert parameter.equal(saved[name]), name
        assert learner.optimizer.state[parameter]["exp_avg"].dtype == torch.float32


def test_passes_in_bfloat16_have_its_values_and_leave_the_parameters_as_they_are(tmp_path: Path) -> None:
    model = tiny_qwen3(tied=True)
    model.save_pretrained(tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    ids = torch.arange(1, 9)[None]
    with computing_in(model, torch.bfloat16):
        for _ in range(2):  # micro-batches
            found = model(input_ids=ids).logits
            found.float().square().mean().backward()
    assert found.equal(rounded(input_ids=ids).logits)
    rounded(input_ids=ids).logits.float().square().mean().backward()
    for (name, mine), theirs in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert mine.detach().equal(before[name])
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, 2 * theirs.grad.float(), rtol=0.02, atol=1e-3)
    with pytest.raises(RuntimeError, match="interrupted"), computing_in(model, torch.bfloat16):
        raise RuntimeError("interrupted")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_weights_in_bfloat16_are_published_as_passes_have_them(
    settings: Callable[..., TrainerSettings],
) -> None:
    assert settings(dtype="bfloat16").consumer().publish_dtype == "bfloat16"
    assert settings(dtype="bfloat16", publish_dtype="float32").consumer().publish_dtype == "float32"
    assert settings(compute_dtype="bfloat16").consumer().publish_dtype is None


def test_an_adapter_on_a_model_in_bfloat16_is_trained_in_float32_and_published_rounded(
    settings: Callable[..., TrainerSettings],
) -> None:
    _, learner = start_learner(settings(dtype="bfloat16", lora=LoraSettings(rank=2)), 0, Ranks())
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in learner.model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    folder = learner.weights(1)
    assert isinstance(folder, Path)
    assert {tensor.dtype for tensor in load_file(folder / "adapter_model.safetensors").values()} == {torch.bfloat16}


def test_a_step_that_changes_almost_nothing_is_warned_of(
    settings: Callable[..., TrainerSettings], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rollq"):
        lines = train(settings(learning_rate=1e-12))
        assert max(line["changed"] for line in lines) < 0.05
        [warned] = [record.getMessage() for record in caplog.records if "changed only" in record.getMessage()]
    assert warned.startswith("step 1 changed only 0")
    assert "updates of about learning_rate = 1e-12 are rounded away: raise it in [trainer]" in warned


def test_a_step_without_a_gradient_is_warned_of_as_such(
    settings: Callable[..., TrainerSettings], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rollq"):
        [line] = train(settings(steps=1), lambda step: batch_of(step, equal=True))
    assert line["changed"] == 0
    assert "step 1 changed only 0 % of the trained numbers" in caplog.text
    assert "the gradient is 0: all advantages are" in caplog.text


@pytest.mark.parametrize("loss", [{}, {"aggregation": "sequence"}, {"aggregation": "constant"}], ids=str)
def test_loss_and_gradient_norm_are_means_over_the_updates_of_a_batch(
    settings: Callable[..., TrainerSettings], tmp_path: Path, loss: dict[str, str]
) -> None:
    """At a learning rate of nothing, the parts of a batch have together the loss of the whole."""
    found = {
        updates: train(
            settings(output=tmp_path / str(updates), steps=1, learning_rate=1e-12, updates_per_batch=updates, loss=loss)
        )[0]
        for updates in (1, 2, 4)
    }
    for line in found.values():
        assert line["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    chosen = settings(loss=loss)
    _, learner = start_learner(chosen, 0, Ranks())
    norms = [norm_of(learner, part) for part in batch_of(1).split(4)]
    assert found[4]["gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-5)


def norm_of(learner: Learner, part: Batch) -> float:
    learner.begin()
    learner.gradients(part, LossMetrics(), None, threading.Event())
    return float(
        torch.nn.utils.get_total_norm([one.grad for one in learner.model.parameters() if one.grad is not None])
    )
