"""Draws of groups as a trainer sees them: uses, probabilities, priorities, and the weights that make up for them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.advantages import AdvantageSettings, draw_weights
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.consumer import Batch, Consumer, ConsumerSettings
from rollq.consumer.claims.connection import Connection
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.trainer import train
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S

REPLAY = {"order": "priority", "max_uses": 3, "max_staleness": 9, "priority_decay": 1.0}

Connect = Callable[..., Consumer]


@pytest.fixture
def connect(server_url: str, run_name: str, model_folder: Path) -> Connect:
    def open_consumer(**settings: object) -> Consumer:
        chosen = ConsumerSettings.model_validate({"timeout_s": PATIENCE_S, **settings})
        return Consumer.connect(server_url, run=run_name, weights=model_folder, settings=chosen)

    return open_consumer


def filled(buffer: Buffer, folder: Path, **rules: object) -> HandWorker:
    make_run(buffer, ("math",), **{**REPLAY, **rules})
    return HandWorker(buffer, tiny_qwen3(1), folder / "worker")


def test_a_trainer_prioritizes_the_groups_of_its_batch_and_weighs_what_it_draws(
    connect: Connect, buffer: Buffer, tmp_path: Path
) -> None:
    worker = filled(buffer, tmp_path)
    advantages = AdvantageSettings(draw_correction=1.0)
    with connect(advantages=advantages) as consumer:
        worker.produce(2)
        first = next(consumer)
        assert first.uses.tolist() == [0, 0]
        assert first.probabilities == pytest.approx([0.5, 0.5])
        assert first.draw_weights == pytest.approx([1, 1])
        assert consumer.prioritize(first.group_ids, [4.0, 1.0]) == 2
        consumer.commit(first)
        second = next(consumer)
        assert second.uses.tolist() == [1, 1]
        assert sorted(second.probabilities) == pytest.approx([0.2, 0.8])
        likely = int(np.argmax(second.probabilities))
        assert second.draw_weights[likely] == pytest.approx(0.25)
        assert second.draw_weights[1 - likely] == 1
        micro = second.to_torch()
        for index in range(len(second.sequences)):
            group = int(second.sequence_groups[index])
            row = micro.advantages[micro.sequence_index == index]
            sample = second.content.sequence_samples[index]
            assert row == pytest.approx(second.advantages[sample] * second.draw_weights[group])


def test_priorities_are_refused_where_nothing_is_drawn_by_them(
    connect: Connect, buffer: Buffer, tmp_path: Path
) -> None:
    worker = filled(buffer, tmp_path, order="uniform")
    with connect() as consumer:
        worker.produce(2)
        batch = next(consumer)
        with pytest.raises(ConfigError, match="no task has order = 'priority'"):
            consumer.prioritize(batch.group_ids, [1.0, 1.0])


def test_two_trainers_with_one_seed_draw_the_same_and_with_another_something_else(
    connect: Connect, buffer: Buffer, tmp_path: Path
) -> None:
    worker = filled(buffer, tmp_path, order="uniform")
    drawn = dict[int, tuple[tuple[str, int], ...]]()
    with connect():
        worker.produce(12)
    for seed in (3, 4):
        with connect(seed=seed, mode="return", takeover=True) as consumer:
            drawn[seed] = next(consumer).group_ids
    with connect(seed=3, mode="return", takeover=True) as consumer:
        assert next(consumer).group_ids == drawn[3] != drawn[4]


def test_a_trainer_keeps_no_group_for_another_use_while_the_server_is_full(
    fresh_server: EmbeddedServer, model_folder: Path, tmp_path: Path
) -> None:
    with Buffer.connect(fresh_server.url, "full") as buffer:
        worker = filled(buffer, tmp_path)
        with Consumer.connect(fresh_server.url, run="full", weights=model_folder) as consumer:
            worker.produce(2)
            batch = next(consumer)
            buffer.client.config_set("maxmemory", "1mb")
            consumer.commit(batch)
        assert buffer.counts("math").progress["not_reused"] == 2


def by_reward(batch: Batch) -> Sequence[float]:
    """A priority for each group: the largest advantage of its samples."""
    return [
        float(np.abs(batch.advantages[batch.sample_groups == group]).max()) + 0.1
        for group in range(len(batch.group_ids))
    ]


def too_few(batch: Batch) -> Sequence[float]:
    return [1.0]


def no_list(batch: Batch) -> None:
    """As a function that forgets its return."""


def trainer_settings(model_folder: Path, tmp_path: Path, **changed: object) -> TrainerSettings:
    values = {"model": model_folder, "output": tmp_path / "out", "timeout_s": PATIENCE_S, "micro_batch_tokens": 64}
    return TrainerSettings.model_validate({**values, **changed})


def test_the_reference_trainer_asks_the_users_function_for_priorities(
    server_url: str, run_name: str, buffer: Buffer, model_folder: Path, tmp_path: Path
) -> None:
    worker = filled(buffer, tmp_path)
    with Consumer.connect(server_url, run=run_name, weights=model_folder):
        worker.produce(4)
    chosen = trainer_settings(model_folder, tmp_path, steps=3, takeover=True, priorities=f"{__name__}.by_reward")
    assert train(Connection(server_url, run_name), chosen, seed=5) == 3
    assert buffer.counts("math").progress["prioritized"] == 3


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.by_reward", "priorities 'nowhere.by_reward': cannot import 'nowhere'"),
        (f"{__name__}.trainer_settings", "expected def priorities"),
    ],
)
def test_a_function_that_gives_no_priorities_is_refused_at_the_start(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path, path: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(Connection(server_url, run_name), trainer_settings(model_folder, tmp_path, steps=1, priorities=path))


@pytest.mark.parametrize(
    ("function", "message"),
    [(too_few, "it returned 1 priorities for 2 groups"), (no_list, "it returned a NoneType, not priorities")],
)
def test_a_function_that_gives_too_few_priorities_ends_training_and_is_named(
    server_url: str,
    run_name: str,
    buffer: Buffer,
    model_folder: Path,
    tmp_path: Path,
    function: Callable[[Batch], object],
    message: str,
) -> None:
    worker = filled(buffer, tmp_path)
    with Consumer.connect(server_url, run=run_name, weights=model_folder):
        worker.produce(2)
    chosen = trainer_settings(
        model_folder, tmp_path, steps=1, takeover=True, priorities=f"{__name__}.{function.__name__}"
    )
    with pytest.raises(ConfigError, match=f'{function.__name__}": {message}'):
        train(Connection(server_url, run_name), chosen)


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_weights_make_up_for_draws_within_a_task(correction: float) -> None:
    weights = draw_weights([0.1, 0.4, np.nan, 0.5, 0.05], [0, 0, 1, 2, 2], correction)
    assert weights == pytest.approx([1, 0.25**correction, 1, 0.1**correction, 1])
