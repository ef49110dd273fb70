"""The servers that hold a buffer: one, or a cluster's primaries. Finds the server that has a key.

Everything that a function touches has one hash tag and so is on one server, and a plain client of that server is
enough: a cluster only adds the table that maps slots to servers.
"""

import logging
import math
import random
import threading
import time
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

from rollq.buffer.errors import ConfigError, ServerRefused, ServerUnavailable
from rollq.buffer.store.connection import Patience, check_server, connect, open_client, patiently, wait_out
from rollq.buffer.store.redis_url import address, node_url, node_urls

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
"""A primary that sends nothing for this many seconds counts as unreachable, and another may have taken its place."""
GONE_MS = 180_000.0
"""A replica that is this far behind cannot be elected: more than `cluster-replica-validity-factor` x
`cluster-node-timeout`, by default 150 s."""
ASK_AGAIN_S = 1.0
"""How often other nodes are asked whether a primary is still alone, in seconds."""
ALONE_S = 10.0
"""For this many seconds, calls do not wait for replicas of a primary that was alone."""
ASK_TIMEOUT_S = 2.0
"""A node that does not answer within this many seconds is skipped when nodes are asked about the cluster."""

T = TypeVar("T")


class Servers(Protocol):
    """The servers that have a buffer's keys. Thread-safe.

    `replicas` is the number of a server's replicas that must have a function's writes before these count. `spread` is
    true if keys in different slots are on different servers.
    """

    replicas: int
    spread: bool

    def of(self, key: str) -> redis.Redis:
        """A client of the server that has `key`. Raises the driver's `ClusterDownError` while none has it."""

    def primaries(self) -> Sequence[redis.Redis]:
        """A client of every server that takes writes."""

    def patiently(self, do: Callable[[], T], patience: Patience) -> T:
        """Return `do()`, repeated while a server is unavailable; see `connection.patiently`."""

    def is_alone(self, client: redis.Redis, key: str, *, has_replicas: bool) -> bool:
        """Whether no replica follows the server of `client`, and another node says that this server has `key` and that
        no replica may take its place: a server that was cut off may not know. Raises the driver's last error if no node
        answers."""

    def was_alone(self, client: redis.Redis) -> bool:
        """Whether the server of `client` was alone a moment ago, so that calls need not wait for its replicas."""

    def close(self) -> None:
        """Close all connections."""


class OneServer:
    """`Servers` with a single server. Its configuration decides which writes survive a failover."""

    replicas = 0
    spread = False

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
        """Return `do()`, repeated while the server is unavailable."""
        return patiently(self._client, do, patience)

    def is_alone(self, client: redis.Redis, key: str, *, has_replicas: bool) -> bool:
        """Return True: there are no other servers."""
        del client, key, has_replicas
        return True

    def was_alone(self, client: redis.Redis) -> bool:
        """Return True: there are no other servers."""
        del client
        return True

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()


class _Slots(NamedTuple):
    """Slot ranges in order: each range's first slot and server, None while the server is unknown."""

    firsts: Sequence[int]
    nodes: Sequence[redis.Redis | None]

    def of(self, key: str) -> redis.Redis | None:
        """The server that has `key`."""
        return self.nodes[bisect_right(self.firsts, key_slot(key.encode())) - 1]


class _Node(NamedTuple):
    """A node as another node sees it. `primary` is the id of the primary that it follows. `seen_ms` is the time of its
    last answer by the other node's clock, or infinity for that other node itself."""

    id: str
    host: str
    port: int
    primary: str
    seen_ms: float
    slots: Collection[int]


def _read_node(asked: str, words: Sequence[str]) -> _Node:
    """Parse a CLUSTER NODES line: id, host:port@bus,name, flags, primary's id, ping and answer in ms, ..., slots."""
    address, _, name = words[1].partition(",")
    host, _, port = address.partition("@")[0].rpartition(":")
    ranges = [word.split("-") for word in words[8:] if not word.startswith("[")]  # slots in [] are on their way
    slots = {slot for first, *last in ranges for slot in range(int(first), int((last or [first])[0]) + 1)}
    seen_ms = math.inf if "myself" in words[2].split(",") else float(words[5])
    return _Node(words[0], _host(name.partition(",")[0] or host, asked), int(port), words[3], seen_ms, slots)


def _host(announced: str, asked: str) -> str:
    """The host that a node announces; without one, the host that was asked."""
    return announced if announced not in ("", "?") else asked


class Cluster:
    """The primaries of a Redis or Valkey Cluster. The URL names some of its nodes. Call `refresh` first."""

    replicas = 1
    spread = True

    def __init__(self, url: str, password: str | None, name: str | None = None) -> None:
        """Does no I/O. `name` names the connections. Raises `ConfigError` for a URL that names no cluster."""
        self._url = url
        self._password = password
        self._name = name
        self._lock = threading.Lock()
        self._clients: dict[str, redis.Redis] = {}  # by the URL of a node; they stay, since others may use them
        self._alone_s: dict[redis.Redis, float] = {}  # when a primary was last found to be alone
        self._slots = _Slots((0,), (None,))
        named = [address(open_client(node, password)) for node in node_urls(url)]
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
        """Return `do()`, repeated while nodes are unavailable, slots move, or a replica takes a primary's place."""
        return wait_out(do, patience, name=self.address, before_next=self._try_refresh)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()

    def refresh(self) -> None:
        """Ask which node has which slot, until a node knows. Raises the last node's error."""
        self._slots = self._ask({*self._clients, *node_urls(self._url)}, self._read_slots, "SLOTS")

    def is_alone(self, client: redis.Redis, key: str, *, has_replicas: bool) -> bool:
        """Whether no replica follows the server of `client`, and another node says that this server has `key` and that
        no replica may take its place.

        A replica that was down for longer than `GONE_MS` may not: no primary elects a replica with data that old.
        """
        now_s = time.monotonic()
        if not has_replicas and now_s - self._alone_s.get(client, -math.inf) < ASK_AGAIN_S:
            return True
        alone = not has_replicas and self._finds_alone(client, key)
        self._alone_s[client] = now_s if alone else -math.inf
        return alone

    def was_alone(self, client: redis.Redis) -> bool:
        """Whether the server of `client` was found to be alone within the last `ALONE_S`."""
        return time.monotonic() - self._alone_s.get(client, -math.inf) < ALONE_S

    def _finds_alone(self, client: redis.Redis, key: str) -> bool:
        others = {url for url, other in list(self._clients.items()) if other is not client}
        nodes = self._ask(others, self._read_nodes, "NODES")
        slot = key_slot(key.encode())
        owner = next((node for node in nodes if slot in node.slots), None)
        if owner is None or self._client_at(owner.host, owner.port) is not client:
            return False
        newest_ms = max(node.seen_ms for node in nodes if node.seen_ms < math.inf)  # by the clock of the asked node
        return all(newest_ms - node.seen_ms > GONE_MS for node in nodes if node.primary == owner.id)

    def _ask(self, urls: Collection[str], read: Callable[[str, Any], T | None], what: str) -> T:
        """The answer from the first of these nodes that knows. Raises the last node's error."""
        failure: driver.RedisError = driver.ClusterDownError("no node knows of any slot")
        for url in random.sample(sorted(urls), len(urls)):  # a node that is cut off from the others may answer first
            try:
                with open_client(url, self._password, timeout_s=ASK_TIMEOUT_S) as client:
                    reply = client.execute_command("CLUSTER", what)
            except driver.RedisError as error:
                failure = error
            else:
                if answer := read(urlsplit(url).hostname or "", reply):
                    return answer
        raise failure

    def _try_refresh(self) -> None:
        with suppress(driver.RedisError, ConfigError):  # the next try says what is wrong
            self.refresh()

    def _read_slots(self, asked: str, ranges: Any) -> _Slots | None:
        """Parse the answer from the node at host `asked`: each range's first slot, last slot and primary."""
        firsts: list[int] = [0]
        nodes: list[redis.Redis | None] = [None]
        for first, last, (host, port, *_), *_ in sorted(ranges, key=itemgetter(0)):
            firsts += (first, last + 1)
            nodes += (self._client_at(_host(host.decode() if host else "", asked), port), None)
        return _Slots(firsts, nodes) if ranges else None

    def _read_nodes(self, asked: str, text: bytes) -> list[_Node]:
        """Parse the answer from the node at host `asked`: a line for each node."""
        nodes = [_read_node(asked, line.split()) for line in text.decode().splitlines()]
        return nodes if any(node.slots for node in nodes) else []

    def _client_at(self, host: str, port: int) -> redis.Redis:
        url = node_url(self._url, host, port)
        with self._lock:
            if url not in self._clients:
                self._clients[url] = open_client(url, self._password, self._name, timeout_s=TIMEOUT_S)
            return self._clients[url]


def connect_servers(url: str, password: str | None = None, name: str | None = None) -> Servers:
    """Return the servers at `url`, all checked to serve rollq. A URL with several hosts means a cluster.

    `name` names the connections in the servers' lists. Waits for servers that are still loading their data, but only a
    moment for servers that do not answer. Raises `ConfigError` (the URL), `ServerUnavailable`, `ServerRefused`
    (password, rights, version, eviction policy, a cluster without replicas).
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
    """Return the servers at `url`, in any state.

    Raises `ConfigError`, and for a cluster `ServerUnavailable` and `ServerRefused`.
    """
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


def _check_cluster(cluster: Cluster) -> None:
    """Check the primaries that answer. Raises `ServerRefused`, and `ServerUnavailable` if no primary answers."""
    patience, replicas, away = Patience(unanswered_s=2.0), [], []
    for client in cluster.primaries():
        try:
            check_server(client, patience, in_cluster=True)
            replicas.append(patiently(client, partial(client.info, "replication"), patience)["connected_slaves"])
        except ServerUnavailable as error:
            log.warning("%s", error)
            away.append(error)
    if not replicas:
        raise away[0]
    if not any(replicas):
        raise ServerRefused(
            f"{cluster.address}: no primary has a replica, so a failover would lose groups - add some, as with "
            "`redis-cli --cluster add-node ... --cluster-slave`"
        )
