"""Idle time of a synchronous trainer: whole batches compared with batches that it trains while they fill.

A real server, with a producer and a worker as processes, and a `Consumer`. The simulated engine replays lengths; the
trainer sleeps in proportion to the tokens of each micro-batch, for a whole batch as long as its generation takes at
least.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.production import read_lengths, roles, write_prompts
from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import TaskRules
from rollq.consumer import Batch, Consumer, MicroBatch

GROUP_SIZE = 4
SAMPLES_IN_FLIGHT = 32
TOKENS_PER_S = 250.0
MICRO_BATCH_TOKENS = 2048
TRAIN_S_PER_TOKEN = 1 / (TOKENS_PER_S * SAMPLES_IN_FLIGHT)
"""The time of generation for a token while all places of the worker are taken."""
STEPS_BEFORE = 1
"""Steps that do not count, while the roles start."""


def measure(quick: bool) -> list[Result]:
    """The trainer's idle share with streamed batches, divided by the share with whole batches."""
    batch_groups, steps, repetitions = (8, 2, 1) if quick else (48, 6, 3)
    lengths = read_lengths()
    numbers = iter(range(2 * repetitions))
    with server() as running:

        def idle(take: Callable[[Consumer], Iterator[MicroBatch]]) -> float:
            return run_one(running.url, f"streaming-{next(numbers)}", take, lengths, batch_groups, steps)

        whole, streamed = take_turns(repetitions, lambda: idle(take_whole), lambda: idle(take_streamed))
    return [
        Result(
            name="streaming",
            what="idle share of a synchronous trainer that trains while its batch fills, over that with whole batches; "
            "training takes as long as generation",
            unit="ratio",
            target=0.5,
            better="lower",
            values=ratios(streamed, whole),
            details={"idle_streamed": float(np.median(streamed)), "idle_whole": float(np.median(whole))},
        )
    ]


def take_whole(consumer: Consumer) -> Iterator[MicroBatch]:
    """The micro-batches of the next batch, once it is whole; then the step ends."""
    batch = next(consumer)
    yield from batch.micro_batches(MICRO_BATCH_TOKENS)
    end_step(consumer, batch)


def take_streamed(consumer: Consumer) -> Iterator[MicroBatch]:
    """The micro-batches of the next batch while it fills; then the step ends."""
    stream = consumer.stream(MICRO_BATCH_TOKENS)
    yield from stream
    assert stream.batch is not None
    end_step(consumer, stream.batch)


def end_step(consumer: Consumer, batch: Batch) -> None:
    """Publish and commit a step."""
    consumer.publish({"weight": torch.full((4,), float(batch.step))}, step=batch.step)
    consumer.commit(batch)


def run_one(
    url: str,
    run: str,
    take: Callable[[Consumer], Iterator[MicroBatch]],
    lengths: Sequence[int],
    batch_groups: int,
    steps: int,
) -> float:
    """Train `steps` steps that count; returns the share of their time in which nothing is trained."""
    task = TaskRules.model_validate({"batch_groups": batch_groups, "group_size": GROUP_SIZE, "max_staleness": 0})
    with TemporaryDirectory(prefix="rollq-bench-") as name, Buffer.connect(url, run) as buffer:
        folder = Path(name)
        write_prompts(folder, 2 * batch_groups * (STEPS_BEFORE + steps))
        write_settings(folder, url, run, task, lengths)
        buffer.create_run()
        buffer.register_task(TASK, task)
        with roles(folder), Consumer.connect(url, run=run, weights={"weight": torch.zeros(4)}) as consumer:
            for step in range(STEPS_BEFORE + steps):
                if step == STEPS_BEFORE:
                    started_s, trained_s = time.monotonic(), 0.0
                for micro in take(consumer):
                    pause_s = int(micro.loss_mask.sum()) * TRAIN_S_PER_TOKEN
                    time.sleep(pause_s)
                    trained_s = trained_s + pause_s if step >= STEPS_BEFORE else 0.0
            return 1 - trained_s / (time.monotonic() - started_s)


def write_settings(folder: Path, url: str, run: str, rules: TaskRules, lengths: Sequence[int]) -> None:
    """Write the `rollq.toml` of producer and worker."""
    (folder / "rollq.toml").write_text(
        f"""
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.{TASK}]
prompts = "prompts.jsonl"
rows.answer_field = ""
judge = "benchmarks.production.judge"
batch_groups = {rules.batch_groups}
group_size = {rules.group_size}
max_staleness = {rules.max_staleness}
max_tokens = 2000
[producer]
strategy = "sync"
[worker]
engine = "simulated"
samples_in_flight = {SAMPLES_IN_FLIGHT}
grace_s = 0
[worker.options]
by_prompt = true
tokens_per_s = {TOKENS_PER_S}
lengths = {list(lengths)}
"""
    )
