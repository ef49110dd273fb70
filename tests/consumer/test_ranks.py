"""The reference trainer in several ranks: the same gradients, and the same weights, whichever rank dies."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollq.buffer.errors import ConfigError
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.checkpoints import OPTIMIZER_FILE, newest_checkpoint
from rollq.consumer.trainer.learner import start_learner
from rollq.consumer.trainer.ranks import Ranks, check_same
from support.trainer_rank import MOMENTS, Kill, filled, metrics, run_ranks, short_training

FILES = ("model.safetensors", OPTIMIZER_FILE)


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerSettings]:
    schedule = {"learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 2}
    return lambda output, **changed: short_training(model_folder, tmp_path / output, **{**schedule, **changed})


def trained(settings: TrainerSettings) -> tuple[int, list[bytes]]:
    """The step of the newest checkpoint, and the bytes of its weights and of its optimizer."""
    checkpoint = newest_checkpoint(settings.output)
    assert checkpoint is not None
    return checkpoint.step, [(checkpoint.folder / name).read_bytes() for name in FILES]


@pytest.mark.long
def test_the_steps_of_two_and_of_four_ranks_are_those_of_one_process(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], model_folder: Path, tmp_path: Path
) -> None:
    lines = {}
    for world_size in (1, 2, 4):
        run, chosen = f"{run_name}{world_size}", settings(f"out{world_size}", updates_per_batch=2)
        with filled(server_url, run, model_folder, tmp_path / run, 4):
            assert run_ranks(world_size, server_url, run, chosen) == [0] * world_size
        lines[world_size] = metrics(chosen)
        folder = newest_checkpoint(chosen.output)
        assert folder is not None
        found = load_file(folder.folder / "model.safetensors")
        if world_size == 1:
            expected = found
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.allclose(expected[name], atol=1e-4, rtol=0), (world_size, name)
    for world_size in (2, 4):
        for one, several in zip(lines[1], lines[world_size], strict=True):
            for name in ("step", "tokens", "samples", "learning_rate", "rewards", "staleness_tokens", "workers"):
                assert several[name] == one[name], name
            for name in ("gradient_norm", "loss", "ratio", "mismatch_kl"):
                assert several[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
            assert several["mismatch"]["tokens"] == one["mismatch"]["tokens"]
            assert several["mismatch"]["mean"] == pytest.approx(one["mismatch"]["mean"], rel=1e-4, abs=1e-7)


@pytest.mark.long
def test_a_checkpoint_of_two_ranks_is_resumed_by_one_and_by_four(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], model_folder: Path, tmp_path: Path
) -> None:
    chosen = settings("out")
    with filled(server_url, run_name, model_folder, tmp_path / "worker", 6):
        for steps, world_size in ((2, 2), (4, 1), (6, 4)):
            several = settings("out", steps=steps, schedule="constant", warmup_steps=0)
            assert run_ranks(world_size, server_url, run_name, several) == [0] * world_size
    assert [line["step"] for line in metrics(chosen)] == [1, 2, 3, 4, 5, 6]
    whole = settings("whole", steps=6, schedule="constant", warmup_steps=0)
    with filled(server_url, f"{run_name}b", model_folder, tmp_path / "other", 6):
        assert run_ranks(2, server_url, f"{run_name}b", whole) == [0, 0]
    for one, other in zip(metrics(chosen), metrics(whole), strict=True):
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)


def test_two_ranks_in_bfloat16_change_and_save_the_numbers_that_one_process_does(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    lines, weights = {}, {}
    for world_size in (1, 2):
        run = f"{run_name}{world_size}"
        chosen = short_training(model_folder, tmp_path / run, dtype="bfloat16", learning_rate=1e-6)
        with filled(server_url, run, model_folder, tmp_path / f"{run}-groups", 4):
            assert run_ranks(world_size, server_url, run, chosen) == [0] * world_size
        newest = newest_checkpoint(chosen.output)
        assert newest is not None
        lines[world_size], weights[world_size] = metrics(chosen), load_file(newest.folder / "model.safetensors")
    for one, two in zip(lines[1], lines[2], strict=True):
        assert min(one["changed"], two["changed"]) > 0.9
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=0.1)
    start = load_file(model_folder / "model.safetensors")
    for name, tensor in weights[2].items():
        assert tensor.dtype == torch.float32
        moved, expected = tensor - start[name], weights[1][name] - start[name]
        assert torch.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.9, name


def undisturbed(
    url: str, run: str, model: Path, folder: Path, steps: int, settings: Callable[..., TrainerSettings]
) -> tuple[int, list[bytes]]:
    chosen = settings("undisturbed", steps=steps)
    with filled(url, run, model, folder, steps):
        assert run_ranks(2, url, run, chosen) == [0, 0]
    return trained(chosen)


def killed_ranks(kills: list[Kill], url: str, run: str, chosen: TrainerSettings) -> None:
    """Start the ranks again and again, and kill one of them each time; then let them end."""
    for kill in kills:
        codes = run_ranks(2, url, run, chosen, kill)
        assert codes[kill.rank] == -9, f"{kill}: {codes}"
    assert run_ranks(2, url, run, chosen) == [0, 0]


class Told(Ranks):
    """Rank 1 of 2, which is told that rank 0 has `first`."""

    def __init__(self, first: object) -> None:
        super().__init__(rank=1, world_size=2)
        self.first = first

    def gather(self, value: Any) -> list[Any]:
        return [self.first, value]


def test_ranks_with_other_settings_or_another_checkpoint_are_refused(
    settings: Callable[..., TrainerSettings],
) -> None:
    check_same(Told({"steps": 4, "seed": 1}), {"steps": 4, "seed": 1})
    with pytest.raises(ConfigError, match=r"^rank 1 has \[trainer\] steps = 5, but rank 0 has 4: start all ranks with"):
        check_same(Told({"steps": 4}), {"steps": 5})
    with pytest.raises(ConfigError, match=r"output = '.*': rank 1 finds a different newest checkpoint .* share this"):
        start_learner(settings("out"), 0, Told([7, "lineage"]))


ALL = [(when, name) for name in MOMENTS for when in ("before", "after")]


@pytest.mark.long
def test_whoever_is_killed_the_weights_are_those_of_an_undisturbed_run(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], model_folder: Path, tmp_path: Path
) -> None:
    """Two kills at random moments, from a seed; the slow test has them all."""
    choose = random.Random(7)
    kills = [Kill(rank, " ".join(choose.choice(ALL)), 1) for rank in (0, 1)]
    expected = undisturbed(server_url, f"{run_name}u", model_folder, tmp_path / "u", 4, settings)
    with filled(server_url, run_name, model_folder, tmp_path / "k", 4):
        chosen = settings("killed")
        killed_ranks(kills, server_url, run_name, chosen)
    assert trained(chosen) == expected


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_kills_in_every_phase_of_a_step_change_no_bit(
    server_url: str, run_name: str, settings: Callable[..., TrainerSettings], model_folder: Path, tmp_path: Path
) -> None:
    kills = [Kill(rank, f"{when} {name}", 1 + calls) for rank in (0, 1) for when, name in ALL for calls in (0, 1)]
    random.Random(1).shuffle(kills)
    steps = 3 * len(kills)
    expected = undisturbed(server_url, f"{run_name}u", model_folder, tmp_path / "u", steps, settings)
    with filled(server_url, run_name, model_folder, tmp_path / "k", steps):
        chosen = settings("killed", steps=steps)
        killed_ranks(kills, server_url, run_name, chosen)
    assert len(kills) > 50
    assert trained(chosen) == expected
