"""Fills a run with a large number of completed groups by plain commands. Their number matters, not their content."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from tqdm import tqdm

from benchmarks.world import TASK
from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import Order
from rollq.buffer.store.keys import TaskKeys, task_keys
from rollq.buffer.store.scores import ARRIVALS
from rollq.buffer.values.rollouts import Status

GROUPS_PER_TRIP = 5_000


@contextmanager
def in_bulk(client: redis.Redis) -> Iterator[None]:
    """Do not sync the append-only file inside the context, and do not rewrite it from then on. A rewrite forks, and
    long after a fork, the first write to every page still has to copy or reclaim the page.
    """
    client.config_set("auto-aof-rewrite-percentage", 0)
    client.config_set("appendfsync", "no")
    yield
    client.config_set("appendfsync", "everysec")


PRIORITY_LEVELS = 64


def fill(buffer: Buffer, layers: Iterable[tuple[int, int]], group_size: int) -> None:
    """Add completed groups. `layers` are pairs of a version and a number of groups.

    If the task's order has priorities, they have 64 levels, from 1/16 to 16.
    """
    keys, order = task_keys(buffer.run, TASK), buffer.clock(TASK).rules.order
    last = int(buffer.counts(TASK).progress["admitted"])
    trips = []
    for version, count in layers:
        for first in range(last + 1, last + count + 1, GROUPS_PER_TRIP):
            trips.append((range(first, min(first + GROUPS_PER_TRIP, last + count + 1)), version))
        last += count
    with tqdm(total=last, unit=" groups", desc="filling", leave=False, disable=None if len(trips) > 5 else True) as bar:
        for ids, version in trips:
            _write(buffer.client, keys, ids, version, group_size, order)
            bar.update(len(ids))


def _score(order: Order, version: int, group_id: int) -> int:
    match order:
        case "arrival":
            return group_id
        case "priority":
            return (group_id % PRIORITY_LEVELS - PRIORITY_LEVELS // 2) * ARRIVALS + group_id
    return version * ARRIVALS + group_id


def _write(client: redis.Redis, keys: TaskKeys, ids: range, version: int, group_size: int, order: Order) -> None:
    """Write the keys that admit, lease and put would have written for these groups, with frames of a few bytes."""
    group = {
        "status": Status.COMPLETED.value, "attempt": 1, "tries": 1, "deaths": 0, "step": 1, "eval": 0,
        "letters": "c" * group_size, "versions": ",".join([str(version)] * group_size), "oldest": version,
        "newest": version, "reward": 0.5, "tokens": 1024, "prompt": "{}",
    }  # fmt: skip
    fields = [word for item in group.items() for word in item]
    frames = [word for index in range(group_size) for word in (index, "frame")]
    connection: Any = client.connection_pool.get_connection()
    pack = connection.pack_command
    try:
        packed = []
        for group_id in ids:
            packed += pack("HSET", keys.group(group_id), "arrival", group_id, *fields)
            packed += pack("HSET", keys.rollout(group_id), *frames)
        scored = [word for group_id in ids for word in (version * ARRIVALS + group_id, group_id)]
        ordered = [word for group_id in ids for word in (_score(order, version, group_id), group_id)]
        packed += pack("ZADD", keys.status(Status.COMPLETED), *ordered)
        packed += pack("ZADD", keys.by_version, *scored)
        packed += pack("HINCRBY", keys.progress, "admitted", len(ids))
        connection.send_packed_command([b"".join(packed)])
        for _ in range(2 * len(ids) + 3):
            connection.read_response()
    finally:
        client.connection_pool.release(connection)
