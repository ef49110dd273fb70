"""A task with three shards, from its prompts to its batches, with a real producer and a worker without a model."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.shards import task_of
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.run_location import open_run
from rollq.cli.settings.file import load_settings
from rollq.consumer import Batch, Consumer, ConsumerSettings
from rollq.consumer.production import describe_production
from rollq.consumer.trainer.step_metrics import describe_batch
from rollq.monitor.report.buffer_reading import take_reading
from rollq.producer.run import open_prompts
from support.any_server import AnyServer
from support.forked_roles import role
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S

ROWS, SHARDS, BATCH = 20, 3, 7


@pytest.fixture
def folder(any_server: AnyServer, fresh_server: EmbeddedServer, run_name: str, tmp_path: Path) -> Iterator[Path]:
    """A run with a producer and a worker; its queue is on a plain server."""
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{row}", "answer": "1"}}\n' for row in range(ROWS)))
    (tmp_path / "rollq.toml").write_text(
        f'run = "{run_name}"\n[redis]\nbuffer_url = "{any_server.url}"\nqueue_url = "{fresh_server.url}"\n'
        f'[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = {BATCH}\ngroup_size = 2\nbatches.shards = {SHARDS}\n'
        'limits.lease_s = 10.0\n[worker]\nengine = "simulated"\noptions = { lengths = [3, 5], tokens_per_s = 500.0 }\n'
    )
    tiny_qwen3().save_pretrained(tmp_path / "model")
    open_run(load_settings(tmp_path / "rollq.toml", {}), threading.Event()).close()
    with role(tmp_path, "produce", "rollq.toml"), role(tmp_path, "work", "rollq.toml"):
        yield tmp_path


def connect(folder: Path, url: str, run: str, *, resume_from: int = 0, **batch: int) -> Consumer:
    settings = ConsumerSettings(transport="redis", timeout_s=PATIENCE_S, takeover=True)
    return Consumer.connect(
        url, run=run, weights=folder / "model", batch=batch, resume_from=resume_from, settings=settings
    )


def train(consumer: Consumer, folder: Path) -> Batch:
    """One step, after which the weights are published, as they are."""
    batch = next(consumer)
    batch.groups[:]  # read while the groups are there
    consumer.publish(folder / "model", step=batch.step)
    consumer.commit(batch)
    return batch


def content(batch: Batch) -> list[object]:
    """All that a trainer is given."""
    tokens = [
        (
            one.task,
            one.group_id,
            *(getattr(one, name).tobytes() for name in ("ids", "logprobs", "versions", "loss_mask")),
        )
        for one in batch.sequences
    ]
    return [batch.step, batch.group_ids, batch.rewards.tobytes(), batch.advantages.tobytes(), tokens]


def test_shards_are_trained_as_one_task_and_replayed_as_they_were(
    folder: Path, any_server: AnyServer, run_name: str
) -> None:
    with connect(folder, any_server.url, run_name) as consumer:
        batches = [train(consumer, folder)]
        consumer.checkpoint(1)
        batches += [train(consumer, folder) for _ in range(5)]
        seen = [content(batch) for batch in batches]
        produced = consumer.take_production()
        assert list(produced) == ["math"]
        assert describe_production(produced["math"])["groups"]["completed"] >= 6 * BATCH
    for batch in batches:
        shards = [name for name, _ in batch.group_ids]
        assert [shards.count(f"math.{number}of3") for number in (1, 2, 3)] == [3, 2, 2]
        assert list(describe_batch(batch)["rewards"]) == ["math"]
    settings = load_settings(folder / "rollq.toml", {})
    with open_prompts(settings.train_tasks(), {}) as prompts, Buffer.connect(any_server.url, run_name) as buffer:
        expected = {
            feed.name: [
                str(prompt.content) for prompt, _ in feed.feed(buffer, settings.seed).sampler.prompts_from(0, 60)
            ]
            for feed in prompts.tasks
        }
        assert list(take_reading(buffer).depths) == ["math"]
        assert {record.task for record in buffer.query({"task": "math"})} == set(expected)
    first_pass = [row for rows in expected.values() for row in rows[: len(set(rows))]]
    assert sorted(first_pass) == sorted(map(str, range(ROWS))), "each prompt is in one shard, once in a pass"
    trained = [(name, group_id) for batch in batches for name, group_id in batch.group_ids]
    assert len(set(trained)) == len(trained)
    with connect(folder, any_server.url, run_name, resume_from=1) as consumer:
        assert [content(train(consumer, folder)) for _ in range(5)] == seen[1:]
        newest = train(consumer, folder)
        assert not set(newest.group_ids) & set(trained)
    with Buffer.connect(any_server.url, run_name) as buffer:
        for record in buffer.query({"task": "math"}):
            prompt = buffer.inspect(record.task, record.uid)["prompt"]
            assert f'"{expected[record.task][record.uid - 1]}"' in prompt


def test_a_trainer_may_take_fewer_groups_of_all_shards_together(
    folder: Path, any_server: AnyServer, run_name: str
) -> None:
    with connect(folder, any_server.url, run_name, math=5) as consumer:
        batch = train(consumer, folder)
        assert [name for name, _ in batch.group_ids] == ["math.1of3"] * 2 + ["math.2of3"] * 2 + ["math.3of3"]
        assert {task_of(name) for name, _ in batch.group_ids} == {"math"}
