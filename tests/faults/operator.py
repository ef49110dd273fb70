"""The operator of a run: orders for single groups, other sizes of batches, and the end of the run with a way back."""

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from faults.history import History
from faults.recording import recorded
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.tickets import open_queue
from support.buffer_run import World, let_go

RECENT = 20
"""Orders are for one of the newest groups of a task, as older ones have mostly left."""


def order_group(history: History, buffer: Buffer, rng: random.Random) -> None:
    """Drop a group, have it sampled again, or put it aside, and record that."""
    task, order = rng.choice(buffer.train_tasks()), rng.choice([*GroupOrder])
    admitted = int(buffer.counts(task).progress["admitted"])
    group_id = rng.randint(max(1, admitted - RECENT), max(1, admitted))
    with recorded(history, "order group", task=task, group_id=group_id, order=order) as call:
        ordered = buffer.order_group(task, group_id, order)
        call.ok(done=ordered.refusal is None)


def resize_batches(buffer: Buffer, sizes: Mapping[str, int], rng: random.Random) -> None:
    """Change how many groups of a task are in a batch, to at most one more than in `sizes`."""
    task = rng.choice(sorted(sizes))
    buffer.change_rules(task, {"batch_groups": rng.randint(1, sizes[task] + 1)})


def delete_and_restore(buffer: Buffer, queue_url: str, snapshot: Path, meanwhile: Callable[[], None]) -> list[str]:
    """Save the run of roles that have ended, delete it, and restore it; returns the keys that it had after `meanwhile`,
    when it was gone."""
    buffer.save(snapshot, replace=True)
    let_go(World(buffer))
    with closing((queue := open_queue(queue_url, buffer.run)).connection):
        buffer.delete_run(queue)
    meanwhile()
    client: Any = buffer.client
    left = [key.decode() for key in client.scan_iter(match=f"rollq:{{{buffer.run}*", count=1000)]
    buffer.restore(snapshot)
    return left
