"""Checkpoints on disk: which of them stay, which one training resumes from, and what else lies beside them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollq.buffer.errors import ConfigError
from rollq.consumer.checkpoints import newest_checkpoint, save_checkpoint
from rollq.consumer.learner import start_learner
from rollq.consumer.ranks import Ranks
from rollq.consumer.settings import LoraSettings, TrainerSettings
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
    with pytest.raises(ConfigError, match=r"step-00000002/trainer\.json' says no step of the weights beside it"):
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
