"""A buffer on a cluster: which server has a key, and what happens when that changes under load."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.common.ports import free_port
from rollq.buffer.errors import ConfigError, ServerRefused, ServerUnavailable
from rollq.buffer.store import servers
from rollq.buffer.store.connection import Patience, open_client
from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.library import READ_ONLY, function_name, function_sources
from rollq.buffer.store.redis_url import check_url, mask_url, node_url, node_urls
from rollq.buffer.store.servers import connect_servers
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import Status
from support.buffer_run import World
from support.cluster_nodes import begun_move, move_slot, move_slot_by_keys
from support.waiting import wait_until

NODE_TIMEOUT_MS = 2000


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), node_timeout_ms=NODE_TIMEOUT_MS) as started:
        yield started


@pytest.fixture
def cluster(shared_cluster: EmbeddedCluster) -> EmbeddedCluster:
    shared_cluster.start()  # what an earlier test has killed
    return shared_cluster


@pytest.fixture
def world(cluster: EmbeddedCluster, run_name: str) -> Iterator[World]:
    with Buffer.connect(cluster.url, run_name, patience=Patience(unanswered_s=60, unready_s=60)) as buffer:
        yield World(buffer).start(math={"lease_s": 300})


# -- URLs


def test_a_url_names_one_server_or_the_nodes_of_a_cluster() -> None:
    url = "rediss://user:pass@a:7000,b:7001,[::1]:7002/0?ssl_ca_certs=ca.crt"
    check_url(url)
    assert node_urls(url) == [
        "rediss://user:pass@a:7000/0?ssl_ca_certs=ca.crt",
        "rediss://user:pass@b:7001/0?ssl_ca_certs=ca.crt",
        "rediss://user:pass@[::1]:7002/0?ssl_ca_certs=ca.crt",
    ]
    assert node_url(url, "fe80::1", 7003) == "rediss://user:pass@[fe80::1]:7003/0?ssl_ca_certs=ca.crt"
    assert mask_url(url) == "rediss://***@a:7000,b:7001,[::1]:7002/0?ssl_ca_certs=ca.crt"
    assert node_urls("unix:///run/a,b.sock") == ["unix:///run/a,b.sock"]
    assert len(node_urls("rediss://a:1,b:2/0?ssl_ca_certs=/x@y/ca.pem")) == 2
    assert node_urls("redis://us,er:pa,ss@a:7000/0") == ["redis://us,er:pa,ss@a:7000/0"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://a:7000,b:7000/3", "a cluster has only database 0"),
        ("redis://a:7000,b:7000?db=3", "a cluster has only database 0"),
        ("redis://u:p@a:7000,u:p@b:7000/0", "user and password come once, before the first host"),
        ("redis://a:7000,/0", "needs a host and a port"),
        ("redis://a:7000,b:70000/0", "the port must be 1 to 65535"),
    ],
)
def test_wrong_urls_of_clusters_are_refused(url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_url(url)


# -- what is refused at the start


def test_one_node_alone_does_not_name_a_cluster(cluster: EmbeddedCluster) -> None:
    with pytest.raises(ServerRefused, match="it is a node of a cluster; name two or more of its nodes"):
        connect_servers(cluster.nodes[0].url)


def test_plain_servers_are_not_taken_for_a_cluster(server: EmbeddedServer) -> None:
    with pytest.raises(ServerRefused, match="a URL with several hosts names the nodes of a cluster"):
        connect_servers(f"redis://127.0.0.1:{server.port},localhost:{server.port}/0")


def test_nodes_that_do_not_answer_are_named() -> None:
    with pytest.raises(ServerUnavailable, match=r"cluster at redis://127\.0\.0\.1:1/0 and 1 others: .* - start it"):
        connect_servers("redis://127.0.0.1:1,127.0.0.1:2/0")


def test_a_node_that_is_away_does_not_matter(cluster: EmbeddedCluster) -> None:
    connect_servers(cluster.url.replace("redis://", "redis://127.0.0.1:1,")).close()


def test_a_cluster_without_replicas_is_refused(tmp_path: Path) -> None:
    why = "no primary has a replica, so a failover would lose groups"
    with EmbeddedCluster(tmp_path, replicas=0) as bare, pytest.raises(ServerRefused, match=why):
        connect_servers(bare.url)


def test_the_queue_must_be_on_a_plain_server(cluster: EmbeddedCluster) -> None:
    with pytest.raises(ConfigError, match=r"is a cluster; RQ does not work on a cluster: set \[redis\] queue_url"):
        open_queue(cluster.url, "run")
    with pytest.raises(ConfigError, match="is a node of a cluster; RQ does not work"):
        open_queue(cluster.nodes[0].url, "run")


def test_a_primary_without_the_functions_gets_them(cluster: EmbeddedCluster, world: World) -> None:
    world.admit(10)
    with open_client(primary_of(cluster, world).url) as client:
        client.function_flush("SYNC")
    assert len(world.lease(4)) == 4
    world.check()


def test_a_cluster_whose_memory_is_full_takes_results(cluster: EmbeddedCluster, world: World) -> None:
    world.admit(2)
    leases = world.lease(2)
    primaries = world.buffer.servers.primaries()
    for client in primaries:
        client.config_set("maxmemory", 1)
    try:
        assert world.put(leases) == [PutOutcome.COMPLETED] * 2
    finally:
        for client in primaries:
            client.config_set("maxmemory", 0)
    world.check()


def test_every_primary_must_evict_nothing(cluster: EmbeddedCluster) -> None:
    found = connect_servers(cluster.url)
    one = found.primaries()[1]
    one.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ServerRefused, match="maxmemory-policy is 'allkeys-lru'"):
            connect_servers(cluster.url)
    finally:
        one.config_set("maxmemory-policy", "noeviction")
        found.close()


# -- what happens under load


class Worker:
    """Leases groups and puts their results, one after the other, in a thread."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.put: list[int] = []
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Worker":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def puts_more(self, count: int) -> None:
        """Wait until it has put that many more groups."""
        goal = len(self.put) + count
        wait_until(lambda: len(self.put) >= goal or bool(self.errors), otherwise=lambda: self.errors)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                (lease,) = self.world.lease(1)
                (outcome,) = self.world.put([lease])
                assert outcome in (PutOutcome.COMPLETED, PutOutcome.DUPLICATE), outcome
                self.put.append(lease.group_id)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.errors.append(error)


@contextmanager
def at_work(world: World) -> Iterator[Worker]:
    world.admit(2000)
    with Worker(world) as worker:
        worker.puts_more(20)
        yield worker
        worker.puts_more(20)
    assert worker.errors == []
    check_nothing_is_lost(world, worker.put)


def check_nothing_is_lost(world: World, put: Sequence[int]) -> None:
    """Every acknowledged group is there once, with its samples."""
    keys = task_keys(world.buffer.run, "math")
    completed = {int(found) for found in world.buffer.send("ZRANGE", keys.status(Status.COMPLETED), 0, -1)}
    assert set(put) <= completed
    assert len(put) == len(set(put))
    world.check()


def primary_of(cluster: EmbeddedCluster, world: World) -> EmbeddedServer:
    """The node that has the task."""
    client: Any = world.buffer.servers.of(task_keys(world.buffer.run, "math").clock)
    port = client.connection_pool.connection_kwargs["port"]
    (node,) = [node for node in cluster.nodes if node.port == port]
    return node


def replica_of(cluster: EmbeddedCluster, primary: EmbeddedServer) -> EmbeddedServer:
    with open_client(primary.url) as client:
        ports = {int(entry["port"]) for name, entry in client.info("replication").items() if name.startswith("slave")}
    (node,) = [node for node in cluster.nodes if node.port in ports]
    return node


def test_a_primary_that_dies_takes_nothing_with_it(cluster: EmbeddedCluster, world: World) -> None:
    with at_work(world) as worker:
        dead = primary_of(cluster, world)
        dead.kill()
        worker.puts_more(20)
        assert primary_of(cluster, world) is not dead
        dead.start()


@pytest.mark.long
def test_slots_move_under_load(cluster: EmbeddedCluster, world: World) -> None:
    with at_work(world) as worker:
        source = primary_of(cluster, world)
        move_slot(cluster, clock_of(world), random.Random(1))
        worker.puts_more(20)
        assert primary_of(cluster, world) is not source


@pytest.mark.long
def test_slots_that_move_key_by_key_are_waited_for(cluster: EmbeddedCluster, world: World) -> None:
    with at_work(world) as worker:
        source = primary_of(cluster, world)
        move_slot_by_keys(cluster, clock_of(world), random.Random(1))
        worker.puts_more(20)
        assert primary_of(cluster, world) is not source


def test_a_large_group_that_is_put_while_its_keys_move_is_filed_afterwards(
    cluster: EmbeddedCluster, world: World
) -> None:
    """Its frame has a slot of its own, so the call creates no key, and would first miss the index that has gone."""
    hasty = Patience(unanswered_s=1, unready_s=1)
    world.complete(3)  # the call's other keys exist
    world.admit(1)
    (lease,) = world.lease(1)
    assert lease.group_id % 2 == 0  # see `text_of`
    with begun_move(cluster, clock_of(world), random.Random(1)) as move:
        move.take(task_keys(world.buffer.run, "math").status(Status.COMPLETED))
        with (
            Buffer.connect(cluster.url, world.buffer.run, patience=hasty) as other,
            pytest.raises(ServerUnavailable, match="is moving these keys"),
        ):
            World(other).put([lease])
    assert world.put([lease]) == [PutOutcome.COMPLETED]
    check_nothing_is_lost(world, [1, 2, 3, 4])


def test_no_function_begins_while_its_keys_move(cluster: EmbeddedCluster, world: World) -> None:
    clock = clock_of(world)
    with begun_move(cluster, clock, random.Random(1)) as move:
        for name in sorted(set(function_sources()) - READ_ONLY):
            with pytest.raises(redis.ResponseError, match="non local key"):
                move.owner.fcall(function_name(name), 1, clock)


def port_of(client: redis.Redis) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


def test_a_result_counts_when_a_replica_has_it(cluster: EmbeddedCluster, world: World) -> None:
    """The replica is stopped: what is put is not acknowledged before it continues."""
    with at_work(world) as worker:
        replica = replica_of(cluster, primary_of(cluster, world))
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGSTOP)
        try:
            before = len(worker.put)
            for _ in range(6):
                time.sleep(0.5)
                unblock(primary_of(cluster, world))  # as a primary does that becomes a replica
            assert len(worker.put) <= before + 1  # one was on its way
        finally:
            os.kill(replica.pid, signal.SIGCONT)
        worker.puts_more(20)


def unblock(server: EmbeddedServer) -> None:
    """End every WAIT on the server with an error."""
    with open_client(server.url) as client:
        for entry in client.client_list():
            if entry["cmd"] == "wait":
                client.client_unblock(int(entry["id"]), error=True)


@pytest.mark.long
def test_a_primary_waits_for_a_replica_that_died_until_none_would_elect_it(
    cluster: EmbeddedCluster, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_work(world) as worker:
        replica = replica_of(cluster, primary_of(cluster, world))
        replica.kill()
        before = len(worker.put)
        time.sleep(3)
        assert len(worker.put) <= before + 1
        monkeypatch.setattr(servers, "GONE_MS", 0)
        worker.puts_more(20)
        replica.start()


NODES = """\
a1 10.0.0.1:7000@17000,first.example master - 0 1000000 1 connected 0-5460 5470
a2 10.0.0.2:7000@17000 myself,slave a1 0 0 1 connected
a3 :0@0 slave,fail,noaddr a1 0 1000 1 disconnected
b1 ::1:7001@17001 master - 0 999000 2 connected 5461-5469 [5470->-a1]
"""


def test_the_nodes_of_a_cluster_are_read() -> None:
    found = [servers._read_node("asked", line.split()) for line in NODES.splitlines()]
    assert [(node.host, node.port, node.primary, node.seen_ms, len(node.slots)) for node in found] == [
        ("first.example", 7000, "-", 1000000, 5462),
        ("10.0.0.2", 7000, "a1", float("inf"), 0),
        ("asked", 0, "a1", 1000, 0),
        ("::1", 7001, "-", 999000, 9),
    ]


def test_a_payload_that_a_primary_lacked_for_a_moment_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one that was replaced while it was away, and does not know it yet."""
    world.complete(2)
    payloads = world.buffer.payloads
    (name,) = [name for page in payloads.pages() for name in page]
    (frame,) = payloads.read([name], lambda _, frame: bytes(frame or b""))
    groups = world.claim(1).groups
    payloads.remove([name])

    def learn(_: float) -> bool:
        with payloads.writing() as write:
            write(name, frame)
        return False

    monkeypatch.setattr(world.buffer.closed, "wait", learn)
    assert len(world.buffer.fetch(groups)) == 2
    payloads.remove([name])
    assert 0 not in world.buffer.sizes_bytes(groups)


def test_the_memory_of_a_cluster_is_that_of_its_fullest_primary(world: World) -> None:
    known = {port_of(world.buffer.servers.of(key)) for key in (world.buffer.keys.info, clock_of(world))}
    other = next(client for client in world.buffer.servers.primaries() if port_of(client) not in known)
    assert world.buffer.memory().share == 0
    other.config_set("maxmemory", 1)  # it has only payloads
    try:
        assert world.buffer.memory().share > 1
    finally:
        other.config_set("maxmemory", 0)


def test_a_role_can_start_while_a_primary_has_no_replica_and_another_shard_is_away(
    cluster: EmbeddedCluster, world: World
) -> None:
    world.admit(2)
    known = {port_of(world.buffer.servers.of(key)) for key in (world.buffer.keys.info, clock_of(world))}
    ports = {port_of(client) for client in world.buffer.servers.primaries()}
    primaries = [node for node in cluster.nodes if node.port in ports]
    away = next(node for node in primaries if node.port not in known)
    bare = next(node for node in primaries if node.port in known)
    for node in (replica_of(cluster, away), away, replica_of(cluster, bare)):
        node.kill()
    assert world.buffer.memory().share == 0
    with Buffer.connect(cluster.url, world.buffer.run) as buffer:
        assert buffer.counts("math").statuses[Status.PENDING] == 2


def clock_of(world: World) -> str:
    return task_keys(world.buffer.run, "math").clock


def test_a_node_that_knows_nothing_is_not_asked_twice(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    directives = {"cluster-enabled": "yes", "cluster-port": str(free_port("127.0.0.1"))}
    with EmbeddedServer(tmp_path, directives=directives) as empty:
        url = f"redis://127.0.0.1:{empty.port},127.0.0.1:{cluster.nodes[0].port}/0"
        for _ in range(8):
            found = connect_servers(url)
            assert len(found.primaries()) == 3
            found.close()


def test_a_queue_that_hangs_is_not_waited_for(fresh_server: EmbeddedServer) -> None:
    assert fresh_server.pid is not None
    os.kill(fresh_server.pid, signal.SIGSTOP)
    try:
        open_queue(fresh_server.url, "run")
    finally:
        os.kill(fresh_server.pid, signal.SIGCONT)
