"""An embedded cluster: primaries and their replicas on this machine, for tests and trials."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis import exceptions as driver

from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import ConfigError, PortTaken, ServerUnavailable
from rollq.buffer.store.embedded_server import PORT_TRIES, EmbeddedServer
from rollq.buffer.store.server_access import START_USER

SLOTS = 16384
"""The number of hash slots in every Redis Cluster."""
BUS_OFFSET = 10_000
"""The offset from the port that clients use to the port that nodes use among themselves."""
LAST_PORT = 65_535
READY_TIMEOUT_S = 60.0
REPLICAS = 1
"""Default number of replicas of each primary."""
LEAST_PRIMARIES = 3
"""With fewer primaries, the others cannot agree that one is dead."""


class EmbeddedCluster:
    """`primaries` Valkey servers that share the slots, each with `replicas`, in folders below `directory`.

    port: the first of the consecutive TCP ports; None for free ports, kept across restarts. node_timeout_ms: how long a
    node may be silent before a replica takes its place. See `EmbeddedServer` for the other arguments.

    Raises `ConfigError` for invalid arguments.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        primaries: int = LEAST_PRIMARIES,
        replicas: int = REPLICAS,
        port: int | None = None,
        bind: str = "127.0.0.1",
        password: str | None = None,
        binary: str | os.PathLike[str] | None = None,
        acl: Path | None = None,
        certificates: Path | None = None,
        directives: Mapping[str, str] | None = None,
        node_timeout_ms: int = 5000,
    ) -> None:
        if primaries < LEAST_PRIMARIES:
            raise ConfigError(f"a cluster of {primaries} primaries: needs at least {LEAST_PRIMARIES} for a majority")
        nodes = primaries * (1 + replicas)
        if port is not None and port + BUS_OFFSET + nodes > LAST_PORT:
            raise ConfigError(f"port {port!r}: the {nodes} nodes also need the ports from {port + BUS_OFFSET} on")
        if bind in ("0.0.0.0", "::"):
            raise ConfigError(f"bind address {bind!r}: nodes name it to clients, so give an address of this machine")
        self.directory = Path(directory).absolute()
        self._primaries = primaries
        self._chooses_ports = port is None
        self.nodes: Sequence[EmbeddedServer] = [
            EmbeddedServer(
                self.directory / f"node-{index}",
                port=_port(bind, port, index),
                bind=bind,
                password=password,
                binary=binary,
                acl=acl,
                certificates=certificates,
                directives=directives,
            )
            for index in range(nodes)
        ]
        bus = None if port is None else port + BUS_OFFSET
        for index, node in enumerate(self.nodes):
            node.start_password = self.nodes[0].start_password  # of the user that replicates
            node.directives |= _directives(node, _port(bind, bus, index), node_timeout_ms)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """The URL by which clients on this machine find the cluster, without its password."""
        first, *others = [node.url for node in self.nodes]
        hosts = [url.partition("://")[2].partition("/")[0] for url in others]
        return f"{','.join([first.removesuffix('/0'), *hosts])}/0"

    def start(self) -> None:
        """Start all nodes, join them if they are new, and return when every slot and every replica is served.

        Raises `ServerUnavailable` if a node does not start, or the cluster does not form.
        """
        try:
            for node in self.nodes:
                self._start(node)
            with ExitStack() as stack:
                clients = [stack.enter_context(node.client()) for node in self.nodes]
                if int(_cluster_info(clients[0])["cluster_slots_assigned"]) < SLOTS:
                    self._join(clients)
                _wait(self.is_ready, "is not complete")
        except BaseException:
            self.stop()
            raise

    def _start(self, node: EmbeddedServer) -> None:
        """Start a node. If its ports are taken and the caller named none, use other ports."""
        for tries_left in reversed(range(PORT_TRIES if self._chooses_ports else 1)):
            try:
                node.start()
                return
            except PortTaken:
                if not tries_left:
                    raise
                node.port = free_port(node.bind)
                node.directives["cluster-port"] = str(free_port(node.bind))

    def is_ready(self) -> bool:
        """Whether all nodes see each other and serve all slots, and all replicas have their primary's data."""
        try:
            with ExitStack() as stack:
                clients = [stack.enter_context(node.client()) for node in self.nodes]
                return all(_is_ready(client, len(clients)) for client in clients)
        except driver.ConnectionError:
            return False

    def stop(self) -> None:
        """Shut all nodes down, replicas first: a primary waits for its replicas."""
        for node in reversed(self.nodes):
            node.stop()

    def _join(self, clients: Sequence[redis.Redis]) -> None:
        """Join nodes that do not know each other into one cluster."""
        primaries, replicas = clients[: self._primaries], clients[self._primaries :]
        for index, client in enumerate(primaries):
            first, end = index * SLOTS // len(primaries), (index + 1) * SLOTS // len(primaries)
            _ask(client, "ADDSLOTSRANGE", first, end - 1)
        for node in self.nodes[1:]:
            _ask(clients[0], "MEET", node.bind, node.port, node.directives["cluster-port"])
        _wait(
            lambda: all(_known_nodes(client) == len(clients) for client in clients),
            "has nodes that do not find each other",
        )
        ids = [_ask(client, "MYID").decode() for client in primaries]
        for index, client in enumerate(replicas):
            _ask(client, "REPLICATE", ids[index % len(ids)])


def _port(bind: str, first: int | None, index: int) -> int:
    return free_port(bind) if first is None else first + index


def _directives(node: EmbeddedServer, bus: int, node_timeout_ms: int) -> dict[str, str]:
    """The configuration of a node with its bus on port `bus`."""
    login: dict[str, str] = {}
    if node.acl:
        login = {"masteruser": START_USER, "masterauth": node.start_password}
    elif node.password:
        login = {"masterauth": node.password}
    return {
        "cluster-enabled": "yes",
        "cluster-port": str(bus),
        "cluster-config-file": "nodes.conf",
        "cluster-node-timeout": str(node_timeout_ms),
        "cluster-require-full-coverage": "no",  # the other nodes keep serving while one is down
        "repl-diskless-sync-delay": "0",
        **login,
        **({"tls-cluster": "yes", "tls-replication": "yes"} if node.certificates else {}),
    }


def _ask(client: redis.Redis, *command: Any) -> Any:
    return client.execute_command("CLUSTER", *command)  # type: ignore[no-untyped-call]


def _cluster_info(client: redis.Redis) -> dict[str, str]:
    lines = _ask(client, "INFO").decode().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _known_nodes(client: redis.Redis) -> int:
    return int(_cluster_info(client)["cluster_known_nodes"])


def _is_ready(client: redis.Redis, nodes: int) -> bool:
    """Whether the node sees all `nodes` serve all slots and, if it is a replica, has its primary's data."""
    try:
        cluster, ranges, replication = _cluster_info(client), _ask(client, "SLOTS"), client.info("replication")
    except driver.BusyLoadingError:
        return False
    serving = {node[2] for _, _, *served_by in ranges for node in served_by}
    sees_all = cluster["cluster_state"] == "ok" and int(cluster["cluster_slots_ok"]) == SLOTS and len(serving) == nodes
    return sees_all and (replication["role"] == "master" or replication["master_link_status"] == "up")


def _wait(condition: Callable[[], bool], trouble: str) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise ServerUnavailable(
                f"the embedded cluster {trouble} after {READY_TIMEOUT_S:g} s: see its nodes' server.log"
            )
        time.sleep(0.05)
