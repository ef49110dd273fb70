"""Checkpoints on disk: which of them stay, which one training resumes from, and what else lies beside them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.consumer.settings import LoraSettings, TrainerSettings
from rollq.consumer.trainer.checkpoints import (
    adopt_weights,
    export_weights,
    load_optimizer,
    newest_checkpoint,
    save_checkpoint,
)
from rollq.consumer.trainer.learner import start_learner
from rollq.consumer.trainer.ranks import Ranks
from support.tiny_qwen3 import tiny_qwen3


@pytest.fixture(scope="module")
def save(model_folder: Path) -> Callable[..., None]:
    model = tiny_qwen3()
    optimizer = torch.optim.AdamW(model.parameters())

    def save(output: Path, *steps: int, kept: int = 2) -> None:
        for step in steps:
            save_checkpoint(output, step, "", model, optimizer, model_folder, kept=kept)

    return save


def names(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def test_copies_under_other_names_stay_and_the_newest_checkpoint_does_too(
    save: Callable[..., None], tmp_path: Path
) -> None:
    save(tmp_path, 1, 2)
    folders = tmp_path / "checkpoints"
    copies = ["step-best", "step-paper", "step-2", "step-00000099", "step-00000002.old"]
    for name in copies:
        shutil.copytree(folders / "step-00000002", folders / name)
    (folders / "step-00000098").mkdir()
    (folders / "step-notes.txt").write_text("the second one was good")
    save(tmp_path, 3, 4, 5)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.folder == folders / "step-00000005"
    assert names(tmp_path) == sorted([*copies, "step-00000098", "step-notes.txt", "step-00000004", "step-00000005"])


def test_a_checkpoint_of_a_later_step_that_was_put_there_does_not_push_out_the_one_just_written(
    save: Callable[..., None], tmp_path: Path
) -> None:
    save(tmp_path, 300)
    save(tmp_path, 4, 5, 6, kept=1)
    assert names(tmp_path) == ["step-00000006", "step-00000300"]


@pytest.mark.parametrize("kept", [1, 3])
def test_as_many_checkpoints_stay_as_the_settings_say(save: Callable[..., None], tmp_path: Path, kept: int) -> None:
    save(tmp_path, *range(1, 6), kept=kept)
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(6 - kept, 6)]


def test_steps_are_compared_as_numbers(save: Callable[..., None], tmp_path: Path) -> None:
    save(tmp_path, 99_999_999, 100_000_000)
    found = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 100_000_000


def test_a_checkpoint_that_says_no_step_is_refused_by_its_name(save: Callable[..., None], tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-00000002" / "trainer.json").write_bytes(b'{"step": ')
    with pytest.raises(
        ConfigError, match=r"step-00000002/trainer\.json' does not give the step of the weights beside it"
    ):
        newest_checkpoint(tmp_path)


def test_an_adapter_that_was_copied_is_not_one_of_an_undone_step(model_folder: Path, tmp_path: Path) -> None:
    settings = TrainerSettings(model=model_folder, output=tmp_path, steps=9, keep_versions=1, lora=LoraSettings(rank=2))
    _, learner = start_learner(settings, 0, Ranks())
    adapters = tmp_path / "adapters"
    learner.weights(1)
    shutil.copytree(adapters / "step-00000001", adapters / "step-best")
    for step in (2, 3):
        learner.weights(step)
    assert sorted(path.name for path in adapters.iterdir()) == ["step-00000002", "step-00000003", "step-best"]


def other_model(model_folder: Path, folder: Path) -> Path:
    """A model of the same shapes as the initial one."""
    shutil.copytree(model_folder, folder)
    tiny_qwen3(7).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"lora": {"rank": 2}}, "has only an adapter on them"),
        ({"lora": {"rank": 2}, "loss": {"kl_coefficient": 0.1}}, "has only an adapter on them"),
        ({"loss": {"kl_coefficient": 0.1}}, "kl_coefficient would compare with these from now on"),
    ],
    ids=str,
)
def test_a_training_that_needs_its_initial_model_does_not_resume_with_another(
    model_folder: Path, tmp_path: Path, setting: dict[str, object], named: str
) -> None:
    def chosen(model: Path) -> TrainerSettings:
        values = {"model": model, "output": tmp_path / "out", "steps": 3, **setting}
        return TrainerSettings.model_validate(values)

    _, learner = start_learner(chosen(model_folder), 0, Ranks())
    for step in (1, 2):  # also a checkpoint of a training that has resumed knows it
        save_checkpoint(
            tmp_path / "out", step, "", learner.model, learner.optimizer, model_folder, initial=learner.initial
        )
        moved = shutil.copytree(model_folder, tmp_path / f"moved-{step}")
        found, learner = start_learner(chosen(moved), 0, Ranks())
        assert found is not None
    with pytest.raises(
        ConfigError, match=rf"^\[trainer\] model = '.*other': .*step-00000002' .* {named}: name the mod"
    ):
        start_learner(chosen(other_model(model_folder, tmp_path / "other")), 0, Ranks())


def test_another_initial_model_that_has_no_effect_is_named(
    save: Callable[..., None], model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = TrainerSettings(model=model_folder, output=tmp_path / "out", steps=3)
    _, learner = start_learner(settings, 0, Ranks())
    save_checkpoint(settings.output, 1, "", learner.model, learner.optimizer, model_folder, initial=learner.initial)
    other = settings.model_copy(update={"model": other_model(model_folder, tmp_path / "other")})
    _, resumed = start_learner(other, 0, Ranks())
    assert "training continues with the checkpoint's, and these have no effect" in caplog.text
    assert resumed.initial == learner.initial, "what training began with, for the next checkpoint"


def test_weights_that_are_adopted_keep_the_digest_of_the_model_that_they_came_from(
    model_folder: Path, tmp_path: Path
) -> None:
    settings = TrainerSettings(model=model_folder, output=tmp_path / "out", steps=3)
    _, learner = start_learner(settings, 0, Ranks())
    made = save_checkpoint(
        settings.output, 1, "", learner.model, learner.optimizer, model_folder, initial=learner.initial
    )
    adopt_weights(tmp_path / "again", 1, made.folder, model_folder)
    adopted = newest_checkpoint(tmp_path / "again")
    assert adopted is not None
    assert adopted.initial == made.initial
    assert made.initial is not None


def test_a_checkpoint_of_an_adapter_is_not_taken_for_that_of_a_model(model_folder: Path, tmp_path: Path) -> None:
    adapted = TrainerSettings(model=model_folder, output=tmp_path, steps=3, lora=LoraSettings(rank=2))
    _, learner = start_learner(adapted, 0, Ranks())
    save_checkpoint(tmp_path, 1, "", learner.model, learner.optimizer, model_folder, initial=learner.initial)
    with pytest.raises(
        WeightsError, match=r"step-00000001' has an adapter but no model: .* \[trainer\.lora\]; restore that"
    ):
        start_learner(adapted.model_copy(update={"lora": None}), 0, Ranks())


def test_a_checkpoint_without_the_state_of_the_optimizer_is_refused(
    save: Callable[..., None], model_folder: Path, tmp_path: Path
) -> None:
    save(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-00000001" / "optimizer.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"has no optimizer\.safetensors: .* `rollq runs recover --weights`"):
        start_learner(TrainerSettings(model=model_folder, output=tmp_path, steps=3), 0, Ranks())


def test_a_checkpoint_without_the_optimizer_is_smaller_and_resumes_with_a_new_one(
    tmp_path: Path, model_folder: Path
) -> None:
    model = tiny_qwen3()
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    sizes = dict[bool, int]()
    for kept in (True, False):
        made = save_checkpoint(tmp_path / str(kept), 1, "", model, optimizer, model_folder, with_optimizer=kept)
        sizes[kept] = sum(file.stat().st_size for file in made.folder.iterdir())
        restored = torch.optim.AdamW(model.parameters())
        load_optimizer(made.folder, model, restored)
        assert bool(restored.state) is kept
    assert sizes[False] < 0.6 * sizes[True]


def test_exports_stay_and_are_loaded_like_any_model(tmp_path: Path, model_folder: Path) -> None:
    model = tiny_qwen3()
    for step in (1, 2, 3):
        folder = export_weights(tmp_path, step, model, model_folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == [
        "step-00000001", "step-00000002", "step-00000003"
    ]  # fmt: skip
    assert newest_checkpoint(tmp_path) is None
