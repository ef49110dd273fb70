"""A trainer that takes one batch and writes what it knows about its tokens, and archives of many groups."""

import threading
from pathlib import Path

import numpy as np

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.buffer import Buffer
from rollq.consumer.claims.connection import Connection
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings
from support.buffer_run import World
from support.dashboard import fill
from support.tiny_qwen3 import tiny_qwen3

MISMATCH = 0.25
"""The trainer's logprob of each token less that of the worker."""


def train_annotated(url: str, run: str, archive: Path, folder: Path) -> int:
    """Train a batch of two groups of math, with annotations in `archive`; returns its step. `folder` is for weights."""
    model = folder / "model"
    tiny_qwen3().save_pretrained(model)
    settings = ConsumerSettings(transport="path", weights_dir=folder / "weights", takeover=True)
    sizes = {"math": 2}
    with Consumer.connect(
        Connection(url, run, archive=str(archive)), weights=model, settings=settings, batch=sizes
    ) as consumer:
        batch = next(consumer)
        sequences = np.repeat(np.arange(len(batch.sequences)), [one.loss_mask.sum() for one in batch.sequences])
        tokens = len(sequences)
        values = {
            "mismatch": np.full(tokens, MISMATCH, np.float32),
            "ratio": np.linspace(0.8, 1.2, tokens, dtype=np.float32),
            "clipped": np.arange(tokens) % 2 == 0,
        }
        consumer.annotate(batch, values, sequences)
        consumer.commit(batch)
    return batch.step


def archive_many(buffer: Buffer, archive: Path, groups: int, batch_groups: int) -> None:
    """Train and archive `groups` groups of task math, `batch_groups` in each step."""
    rules: dict[str, object] = {
        "archive": True,
        "batch_groups": batch_groups,
        "max_staleness": 1000,
        "max_uncheckpointed_steps": 1000,
    }
    world = World(buffer).start(math=rules)
    for step in range(1, groups // batch_groups + 1):
        fill(world, batch_groups)
        world.train(step, math=batch_groups)
        buffer.checkpoint(world.held, step)
    Archiver(buffer, str(archive), wait_s=0).finish(threading.Event())
