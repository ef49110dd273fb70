"""TRL's trainer on batches of rollq: ranks, accumulation, SIGKILL and resume, how training ends, what is refused."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import TrainerCallback

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.errors import ConfigError, FencedError, InvalidGroup, ProductionStopped, SyncFirst
from rollq.buffer.weights.loading import load_weights
from rollq.consumer import Batch, Consumer, ConsumerSettings
from rollq.integrations import trl
from rollq.integrations.trl import installed
from rollq.integrations.trl.checkpoints import begin, finish, newest_checkpoint
from rollq.integrations.trl.limits import check_config
from support.finished_groups import finished_group
from support.tiny_qwen3 import tiny_qwen3
from support.trl_runs import STEPS, Norms, config, insert_groups, train, train_in_ranks

WEIGHTS = "model.safetensors"


@pytest.fixture
def run(buffer: Buffer, run_name: str) -> str:
    """A run with groups for `STEPS` steps."""
    insert_groups(buffer)
    return run_name


class At(TrainerCallback):
    """Does something once, at the end of a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self._step:
            self._act()


@pytest.mark.slow  # one process that stops and resumes is in tests/docs/test_trl_page.py
def test_two_ranks_that_are_killed_and_resume_train_as_one_process_does(
    server_url: str, model_folder: Path, tmp_path: Path
) -> None:
    found = {}
    for run, ranks, killed_after in [("one", 1, None), ("two", 2, None), ("killed", 2, 3)]:
        with Buffer.connect(server_url, run) as buffer:
            insert_groups(buffer)
        train_ranks = (server_url, run, model_folder, tmp_path / run, ranks)
        found[run] = train_in_ranks(*train_ranks, killed_after=killed_after, gradient_accumulation_steps=4)
    newest = newest_checkpoint(tmp_path / "killed")
    assert newest is not None
    assert newest.step == 2
    found["killed"] = train_in_ranks(*train_ranks, gradient_accumulation_steps=4)
    assert list(found["two"]) == [str(step) for step in range(1, STEPS + 1)]
    assert list(found["two"].values()) == pytest.approx(list(found["one"].values()), rel=1e-5)
    assert found["killed"] == {step: norm for step, norm in found["two"].items() if int(step) > 2}
    undisturbed, resumed = (
        load_file(tmp_path / run / f"checkpoint-{STEPS}" / "model.safetensors") for run in ("two", "killed")
    )
    assert all(resumed[name].equal(tensor) for name, tensor in undisturbed.items())
    for run in ("two", "killed"):
        with Buffer.connect(server_url, run) as buffer:
            clock, live = buffer.clock("demos"), buffer.live_model()
            assert live is not None
            assert (live.version, clock.committed, clock.checkpoint) == (STEPS, STEPS, STEPS)
            published = load_file(
                load_weights(buffer, live.uri, live.digest, tmp_path / f"live-{run}") / "model.safetensors"
            )
        assert all(published[name].equal(tensor) for name, tensor in undisturbed.items())


def test_ranks_end_together_when_production_was_stopped(
    buffer: Buffer, server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    insert_groups(buffer, steps=1)
    buffer.set_control("demos", Control.STOPPED, "few were worth training")
    train_in_ranks(server_url, run_name, model_folder, tmp_path, 2, ends=[1, 0])
    assert newest_checkpoint(tmp_path) is not None


def test_stop_ends_training_after_a_step_with_a_checkpoint(
    server_url: str, run: str, model_folder: Path, tmp_path: Path
) -> None:
    args = config(tmp_path, save_steps=100, save_total_limit=1)
    for last in (2, 3):
        stop = threading.Event()
        with trl.connect(server_url, run=run, model=model_folder, args=args, stop=stop) as consumer:
            trainer = trl.RollqGRPOTrainer(
                str(model_folder), args, consumer, max_tokens=400, callbacks=[At(last, stop.set)]
            )
            assert trainer.train().global_step == last
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        assert newest.step == last
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    with Buffer.connect(server_url, run) as buffer:
        assert buffer.clock("demos").checkpoint == 3


def test_training_ends_with_the_error_of_the_consumer(
    buffer: Buffer, server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    insert_groups(buffer, steps=1)
    buffer.set_control("demos", Control.STOPPED, "few were worth training")
    args = config(tmp_path)
    with (
        trl.connect(server_url, run=run_name, model=model_folder, args=args) as consumer,
        pytest.raises(ProductionStopped, match="few were worth training"),
    ):
        train(model_folder, args, consumer, Norms())
    newest = newest_checkpoint(tmp_path)
    assert newest is not None, "the last step is saved first"
    assert newest.step == 1


def test_a_trainer_that_was_replaced_ends_with_a_fenced_error(
    server_url: str, run: str, model_folder: Path, tmp_path: Path
) -> None:
    args = config(tmp_path)

    def replace() -> None:
        other = ConsumerSettings(takeover=True, trainer_id="another")
        with Consumer.connect(server_url, run=run, weights=model_folder, settings=other):
            pass

    with trl.connect(server_url, run=run, model=model_folder, args=args) as consumer:
        trainer = trl.RollqGRPOTrainer(str(model_folder), args, consumer, max_tokens=400, callbacks=[At(2, replace)])
        with pytest.raises(FencedError, match="epoch 1 was replaced by epoch 2"):
            trainer.train()


class Lacking(Consumer):
    """Asks for the weights of step 1 once, before the batch of step 2."""

    asked: bool = False
    live: list[int]

    def __next__(self) -> Batch:
        if self.step == 2 and not self.asked:
            self.asked = True
            raise SyncFirst("publish the weights of step 1")
        return super().__next__()

    def publish(self, *args: Any, **kwargs: Any) -> int:
        self.live.append(kwargs["step"])
        return super().publish(*args, **kwargs)


def test_weights_are_published_when_they_are_due_and_when_a_batch_needs_them(
    buffer: Buffer, server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    insert_groups(buffer, sync_weights_interval=2, max_staleness=2)
    with Lacking.connect(server_url, run=run_name, weights=model_folder) as consumer:
        consumer.live = []
        train(model_folder, config(tmp_path, save_strategy="no"), consumer, Norms())
        assert consumer.live == [1, 2, 4]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_steps": -1}, "max_steps = -1: it is the last train step"),
        ({"loss_type": "bnpo"}, "loss_type = 'bnpo': use one of dapo, cispo, grpo, dr_grpo"),
        ({"num_iterations": 2}, "num_iterations = 2: it must be 1"),
        ({"steps_per_generation": 2}, "steps_per_generation = 2: leave it out"),
        ({"use_vllm": True}, "use_vllm = True: leave it out"),
        ({"entropy_coef": 0.1}, "entropy_coef = 0.1: leave it out"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile = 0.2: leave it out: the quantile depends on micro"),
        ({"use_adaptive_entropy": True}, "use_adaptive_entropy = True: leave it out"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions = True: .*'overlong'"),
        ({"sync_ref_model": True}, "sync_ref_model = True: leave it out: checkpoints lack the reference"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha = 5.0: leave it out"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor = 0.1: leave it out"),
        ({"save_strategy": "epoch"}, "save_strategy.*: set it to 'steps' or 'no'"),
    ],
)
def test_settings_of_trl_that_it_cannot_honour_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config(tmp_path, **changed))


@pytest.mark.parametrize(
    ("changed", "max_tokens", "message"),
    [
        ({"temperature": 0.5}, 400, r"step 1 has samples of temperature 1, but GRPOConfig temperature = 0.5"),
        ({}, 60, r"step 1: the batch needs \d micro-batches .* gradient_accumulation_steps"),
    ],
)
def test_a_batch_that_cannot_be_trained_stays_claimed(
    changed: dict[str, Any], max_tokens: int, message: str,
    server_url: str, run: str, buffer: Buffer, model_folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    args = config(tmp_path, save_strategy="no", **changed)
    with Consumer.connect(server_url, run=run, weights=model_folder) as consumer:
        trainer = trl.RollqGRPOTrainer(str(model_folder), args, consumer, max_tokens=max_tokens)
        with pytest.raises((ConfigError, InvalidGroup), match=message):
            trainer.train()
        assert consumer.step == 1


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        (None, "step 1 has samples that were inserted without logprobs"),
        ([-1e4] * 3, "step 1: the gradient is not finite.* stays claimed"),
    ],
)
def test_samples_without_usable_logprobs_change_no_weights(
    logprobs: list[float] | None,
    message: str,
    server_url: str,
    run_name: str,
    buffer: Buffer,
    model_folder: Path,
    tmp_path: Path,
) -> None:
    insert_groups(buffer, steps=0)
    buffer.insert("demos", [finished_group(number, 4, logprobs=logprobs) for number in range(3)], source="bad")
    with Consumer.connect(server_url, run=run_name, weights=model_folder) as consumer:
        trainer = trl.RollqGRPOTrainer(str(model_folder), config(tmp_path), consumer, max_tokens=400)
        with pytest.raises(InvalidGroup, match=message):
            trainer.train()
    assert trainer.model.state_dict()["lm_head.weight"].equal(tiny_qwen3().lm_head.weight)


def test_another_checkpoint_than_that_of_the_consumer_is_refused(
    server_url: str, run: str, model_folder: Path, tmp_path: Path
) -> None:
    with Consumer.connect(server_url, run=run, weights=model_folder) as consumer:
        trainer = trl.RollqGRPOTrainer(str(model_folder), config(tmp_path), consumer, max_tokens=400)
        with pytest.raises(ConfigError, match="the consumer resumes from step 0; leave it out"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_a_checkpoint_counts_when_its_last_file_is_there(tmp_path: Path) -> None:
    for step in (2, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        finish(folder, step, "lineage")
    (tmp_path / "checkpoint-12").mkdir()
    assert newest_checkpoint(tmp_path) == (10, tmp_path / "checkpoint-10", "lineage")
    begin(tmp_path / "checkpoint-10")
    assert newest_checkpoint(tmp_path) == (2, tmp_path / "checkpoint-2", "lineage")


def test_a_copy_of_a_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    for name, step in (("checkpoint-2", 2), ("checkpoint-best", 2), ("checkpoint-30", 4)):
        (tmp_path / name).mkdir()
        finish(tmp_path / name, step, "lineage")
    assert newest_checkpoint(tmp_path) == (2, tmp_path / "checkpoint-2", "lineage")


def test_another_release_of_trl_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed.check_installed()
    monkeypatch.setattr(installed, "version", lambda _: "1.17.0")
    with pytest.raises(ConfigError, match=r"with TRL 1\.16, but 1\.17\.0 is installed: pip install 'rollq\[trl\]'"):
        installed.check_installed()
    monkeypatch.setattr(installed, "version", lambda _: "1.160")
    with pytest.raises(ConfigError, match=r"1\.160 is installed"):
        installed.check_installed()
