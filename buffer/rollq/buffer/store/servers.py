"""The servers that hold a buffer: one, or the primaries of a cluster. Finds the one that has a key.

Everything that a function touches has one hash tag, so it is on one server, and a plain client of that server is
enough: a cluster only adds the table of which server has which slot.
"""

import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, TypeVar
from urllib.parse import urlsplit

import redis
from redis import exceptions as driver
from redis.crc import key_slot

from rollq.buffer.errors import ServerRefused
from rollq.buffer.store.connection import Patience, check_server, connect, open_client, patiently, wait_out
from rollq.buffer.store.redis_url import address, node_url, node_urls

ASK_TIMEOUT_S = 2.0
"""A node that takes longer to say who has which slot is passed over."""

T = TypeVar("T")


class Servers(Protocol):
    """Where the keys of a buffer are. Thread-safe.

    `replicas`: how many replicas of a server must have what a function has written before it counts.
    """

    replicas: int

    def of(self, key: str) -> redis.Redis:
        """A client of the server that has `key`. Raises the driver's `ClusterDownError` while none has it."""

    def primaries(self) -> Sequence[redis.Redis]:
        """A client of every server that takes writes."""

    def patiently(self, do: Callable[[], T], patience: Patience) -> T:
        """`do()`, repeated while a server is away; see `connection.patiently`."""

    def is_primary(self, client: redis.Redis, key: str) -> bool:
        """Whether others say that the server of `client` has `key`. One that was cut off may not know that it has lost
        it. Raises the driver's error of the last one if none answers."""

    def close(self) -> None:
        """Close all connections."""


class OneServer:
    """`Servers` that are one. What it acknowledges after a failover is for its own configuration to decide."""

    replicas = 0

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def of(self, key: str) -> redis.Redis:
        """The client."""
        del key
        return self._client

    def primaries(self) -> Sequence[redis.Redis]:
        """The client."""
        return (self._client,)

    def patiently(self, do: Callable[[], T], patience: Patience) -> T:
        """`do()`, repeated while the server is away."""
        return patiently(self._client, do, patience)

    def is_primary(self, client: redis.Redis, key: str) -> bool:
        """True: there are no others."""
        del client, key
        return True

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


class _Slots(NamedTuple):
    """Ranges of slots in order: the first slot of each, and the server that has it; None where none is known."""

    firsts: Sequence[int]
    nodes: Sequence[redis.Redis | None]

    def of(self, key: str) -> redis.Redis | None:
        """The server that has `key`."""
        return self.nodes[bisect_right(self.firsts, key_slot(key.encode())) - 1]


class Cluster:
    """The primaries of a Redis or Valkey Cluster, some nodes of which a URL names. Begins with `refresh`."""

    replicas = 1

    def __init__(self, url: str, password: str | None, name: str | None = None) -> None:
        """Does no I/O. `name`: of connections. Raises `ConfigError` for a URL that names no cluster."""
        self._url = url
        self._password = password
        self._name = name
        self._lock = threading.Lock()
        self._clients: dict[str, redis.Redis] = {}  # by the URL of a node; they stay, since others may use them
        self._slots = _Slots((0,), (None,))
        named = [address(open_client(one, password)) for one in node_urls(url)]
        self.address = f"cluster at {named[0]} and {len(named) - 1} others"

    def of(self, key: str) -> redis.Redis:
        """A client of the primary that has `key`. Raises the driver's `ClusterDownError` while none is known."""
        client = self._slots.of(key)
        if client is None:
            raise driver.ClusterDownError(f"no primary serves the slot of {key!r}")
        return client

    def primaries(self) -> Sequence[redis.Redis]:
        """A client of every primary that has slots."""
        return list(dict.fromkeys(client for client in self._slots.nodes if client is not None))

    def patiently(self, do: Callable[[], T], patience: Patience) -> T:
        """`do()`, repeated while nodes are away, slots move, or a replica takes the place of a primary."""
        return wait_out(do, patience, name=self.address, before_next=self._try_refresh)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()

    def refresh(self) -> None:
        """Find out which node has which slot, from the first node that answers. Raises the error of the last one."""
        self._slots = self._ask({*self._clients, *node_urls(self._url)})

    def is_primary(self, client: redis.Redis, key: str) -> bool:
        """Whether another node says that the server of `client` has `key`."""
        others = {url for url, other in self._clients.items() if other is not client}
        return self._ask(others).of(key) is client

    def _ask(self, urls: Collection[str]) -> _Slots:
        """The slots, as the first of these nodes says that answers. Raises the error of the last one."""
        failure: driver.RedisError = driver.ConnectionError("no other node is known")
        for url in random.sample(sorted(urls), len(urls)):  # one that is cut off from the others may answer first
            try:
                with open_client(url, self._password, timeout_s=ASK_TIMEOUT_S) as client:
                    ranges = client.execute_command("CLUSTER", "SLOTS")
            except driver.RedisError as error:
                failure = error
            else:
                return self._read(urlsplit(url).hostname or "", ranges)
        raise failure

    def _try_refresh(self) -> None:
        with suppress(driver.RedisError):  # the next try says what is wrong
            self.refresh()

    def _read(self, asked: str, ranges: Any) -> _Slots:
        """The answer of the node at host `asked`: first slot, last slot, and the primary, of each range."""
        firsts: list[int] = [0]
        nodes: list[redis.Redis | None] = [None]
        for first, last, (host, port, *_), *_ in sorted(ranges, key=itemgetter(0)):
            firsts += (first, last + 1)
            nodes += (self._client_at(host.decode() if host else asked, port), None)
        return _Slots(firsts, nodes)

    def _client_at(self, host: str, port: int) -> redis.Redis:
        url = node_url(self._url, host, port)
        with self._lock:
            if url not in self._clients:
                self._clients[url] = open_client(url, self._password, self._name)
            return self._clients[url]


def connect_servers(url: str, password: str | None = None, name: str | None = None) -> Servers:
    """Return the servers at `url`, all of them known to serve rollq: a cluster where it names several hosts.

    `name`: of the connections, as the servers list them.
    Waits for servers that are still loading their data, but only a moment for those that do not answer.
    Raises `ConfigError` (the URL), `ServerUnavailable`, `ServerRefused` (password, rights, version, eviction policy, a
    cluster without replicas).
    """
    if len(node_urls(url)) == 1:
        return OneServer(connect(url, password, name))
    cluster = Cluster(url, password, name)
    try:
        _find_primaries(cluster)
        _check_cluster(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def open_servers(url: str, password: str | None = None) -> Servers:
    """Return the servers at `url`, whatever their state. Raises `ConfigError`, and of a cluster `ServerUnavailable` and
    `ServerRefused`."""
    if len(node_urls(url)) == 1:
        return OneServer(open_client(url, password))
    cluster = Cluster(url, password)
    _find_primaries(cluster)
    return cluster


def _find_primaries(cluster: Cluster) -> None:
    patience = Patience(unanswered_s=2.0)
    try:
        cluster.patiently(cluster.refresh, patience)
    except driver.ResponseError as error:
        raise ServerRefused(
            f"{cluster.address}: {error} - a URL with several hosts names the nodes of a cluster: give the URL of one "
            "host for a plain server"
        ) from error
    if not cluster.primaries():
        raise ServerRefused(f"{cluster.address}: no node has slots - `rollq redis --cluster 3` starts a cluster here")


def _check_cluster(cluster: Cluster) -> None:
    patience = Patience(unanswered_s=2.0)
    for client in cluster.primaries():
        check_server(client, patience, in_cluster=True)
        replication = patiently(client, partial(client.info, "replication"), patience)
        if replication["connected_slaves"] < 1:
            raise ServerRefused(
                f"{address(client)}: this primary has no replica, so its groups would be lost with it - add one, as "
                "with `redis-cli --cluster add-node ... --cluster-slave`"
            )
