"""The nodes of a cluster: which has a slot, and moving one."""

import random
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from redis.crc import key_slot

from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.servers import connect_servers
from support.waiting import wait_until


def move_slot(cluster: EmbeddedCluster, key: str, rng: random.Random) -> None:
    """Move the slot of a key from the primary that has it to another one, and wait until that is over."""
    slot = key_slot(key.encode())
    servers = connect_servers(cluster.url)
    with closing(servers):
        ids = {ask(client, "MYID"): client for client in servers.primaries()}
        (owner,) = [
            node[2] for first, last, node, *_ in ask(next(iter(ids.values())), "SLOTS") if first <= slot <= last
        ]
        target = rng.choice(sorted(set(ids) - {owner}))
        ask(ids[owner], "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.decode())
        wait_until(lambda: _is_over(ask(ids[owner], "GETSLOTMIGRATIONS")[0]))


def _is_over(migration: Sequence[Any]) -> bool:
    """Whether a move of slots has ended, well or not. The server lists it as names and values."""
    return dict(zip(migration[::2], migration[1::2], strict=True))[b"state"] in (b"success", b"failed", b"cancelled")


def ask(client: Any, *command: Any) -> Any:
    """The reply of a CLUSTER command."""
    return client.execute_command("CLUSTER", *command)
