"""Runs of another release of rollq: none is worked on that has another schema."""

import pytest

from rollq.buffer.errors import RunMismatch, StoreLost
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.store.keys import SCHEMA_VERSION
from support.buffer_run import World


def test_a_role_that_only_reads_checks_the_schema(world: World) -> None:
    world.start()
    world.buffer.client.hset(world.buffer.keys.info, "schema", 5)
    monitor = MonitorBuffer(world.buffer.servers, world.buffer.run)
    for call in (lambda: monitor.incarnation, monitor.tasks, lambda: monitor.counts("math")):
        with pytest.raises(RunMismatch, match=f"created with schema 5, this rollq has {SCHEMA_VERSION}: use the rollq"):
            call()
    world.buffer.client.hdel(world.buffer.keys.info, "incarnation", "schema")
    world.buffer.client.hset(world.buffer.keys.info, mapping={"restoring": "digest", "restored_as": "cafe"})
    with pytest.raises(StoreLost, match="is not in this store"):
        monitor.tasks()
