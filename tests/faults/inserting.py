"""Finished groups of an expert, and the role that inserts them into the tasks that are offline."""

import threading

import numpy as np

from faults.digests import samples_digest
from faults.history import History
from faults.recording import recorded
from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import FinishedGroup, Prompt
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from support.finished_groups import finished_sample

SOURCE = "expert"
LARGE_TEXT = "y" * (MOST_INLINE_BYTES + 1)
SPARE = 4
"""Groups of each task that a trainer finds ready."""
PORTION = 1
TICK_S = 0.1


def demonstration(number: int, size: int) -> FinishedGroup:
    """The expert's group of this number, always the same; every second one is large."""
    drawn = np.random.default_rng(number).integers(32, 127, (size, 4), dtype=np.int32)
    text = LARGE_TEXT if number % 2 else ""
    samples = (finished_sample(response=ids.tolist(), logprobs=[-0.5] * len(ids), text=text) for ids in drawn)
    return FinishedGroup(Prompt(f"demo {number}"), tuple(samples))


def insert_recorded(history: History, buffer: Buffer, task: str, count: int) -> None:
    """Insert the expert's next groups, and record them."""
    after, size = buffer.inserted(task, SOURCE), buffer.rules(task).group_size
    groups = [demonstration(after + number, size) for number in range(count)]
    digests = [samples_digest(group.samples) for group in groups]
    with recorded(history, "insert", task=task, after=after, digests=digests) as call:
        call.ok(added=buffer.insert(task, groups, source=SOURCE, after=after))


def keep_inserting(history: History, buffer: Buffer, stop: threading.Event) -> None:
    """Insert groups whenever few are ready."""
    while not stop.wait(TICK_S):
        for task in buffer.train_tasks():
            if buffer.rules(task).offline and buffer.counts(task).ready < SPARE:
                insert_recorded(history, buffer, task, PORTION)
