"""The nodes of a cluster: which has a slot, and moving one."""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from redis.crc import key_slot

from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.servers import connect_servers
from support.waiting import wait_until


def move_slot(cluster: EmbeddedCluster, key: str, rng: random.Random) -> None:
    """Move the slot of a key from the primary that has it to another one, and wait until that is over."""
    slot = key_slot(key.encode())
    with _owner_and_target(cluster, slot, rng) as (owner, target):
        ask(owner, "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", ask(target, "MYID").decode())
        wait_until(lambda: _is_over(ask(owner, "GETSLOTMIGRATIONS")[0]))


def move_slot_by_keys(cluster: EmbeddedCluster, key: str, rng: random.Random) -> None:
    """Likewise, but key by key, as `redis-cli --cluster reshard` does; the keys go in any order, and slowly."""
    with begun_move(cluster, key, rng) as move:
        while keys := move.keys_left():
            for moved in rng.sample(keys, len(keys)):
                move.take(moved)
                time.sleep(0.001)


class Move(NamedTuple):
    """A move of a slot, key by key, that has begun."""

    slot: int
    owner: Any
    target: Any

    def keys_left(self) -> list[bytes]:
        """Up to 1,000 keys that the owner still has."""
        keys: list[bytes] = ask(self.owner, "GETKEYSINSLOT", self.slot, 1000)
        return keys

    def take(self, key: str | bytes) -> None:
        """Move one key."""
        address = self.target.connection_pool.connection_kwargs
        self.owner.execute_command("MIGRATE", address["host"], address["port"], key, 0, 5000)


@contextmanager
def begun_move(cluster: EmbeddedCluster, key: str, rng: random.Random) -> Iterator[Move]:
    """Begin to move the slot of a key; afterwards, move the keys that are left, and end the move."""
    slot = key_slot(key.encode())
    with _owner_and_target(cluster, slot, rng) as (owner, target):
        target_id = ask(target, "MYID")
        ask(target, "SETSLOT", slot, "IMPORTING", ask(owner, "MYID"))
        ask(owner, "SETSLOT", slot, "MIGRATING", target_id)
        move = Move(slot, owner, target)
        yield move
        while keys := move.keys_left():
            for left in keys:
                move.take(left)
        for client in (target, owner):
            ask(client, "SETSLOT", slot, "NODE", target_id)


@contextmanager
def _owner_and_target(cluster: EmbeddedCluster, slot: int, rng: random.Random) -> Iterator[tuple[Any, Any]]:
    """Clients of the primary that has a slot, and of any other one."""
    with closing(connect_servers(cluster.url)) as servers:
        ids = {ask(client, "MYID"): client for client in servers.primaries()}
        (owner,) = [
            node[2] for first, last, node, *_ in ask(next(iter(ids.values())), "SLOTS") if first <= slot <= last
        ]
        yield ids[owner], ids[rng.choice(sorted(set(ids) - {owner}))]


def _is_over(migration: Sequence[Any]) -> bool:
    """Whether a move of slots has ended, well or not. The server lists it as names and values."""
    return dict(zip(migration[::2], migration[1::2], strict=True))[b"state"] in (b"success", b"failed", b"cancelled")


def ask(client: Any, *command: Any) -> Any:
    """The reply of a CLUSTER command."""
    return client.execute_command("CLUSTER", *command)
