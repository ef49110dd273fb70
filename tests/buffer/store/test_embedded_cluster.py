"""The embedded cluster: real nodes on this machine."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cluster import ClusterNode, RedisCluster

from rollq.buffer.errors import ConfigError
from rollq.buffer.store.embedded_cluster import EmbeddedCluster
from support.waiting import wait_until


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    with EmbeddedCluster(tmp_path, password="secret", node_timeout_ms=2000) as started:
        yield started


def client_of(cluster: EmbeddedCluster) -> RedisCluster:
    nodes = [ClusterNode(node.bind, node.port) for node in cluster.nodes if node.running]  # type: ignore[no-untyped-call]
    return RedisCluster(startup_nodes=nodes, password="secret")


def test_a_cluster_serves_all_slots_and_keeps_its_data_over_a_restart(cluster: EmbeddedCluster) -> None:
    assert cluster.url.count(",") == 5
    with client_of(cluster) as client:
        for number in range(100):
            client.set(f"key-{number}", number)
        assert len(client.get_primaries()) == len(client.get_replicas()) == 3
    cluster.stop()
    assert not any(node.running for node in cluster.nodes)
    cluster.start()
    with client_of(cluster) as client:
        assert [client.get(f"key-{number}") for number in range(100)] == [b"%d" % number for number in range(100)]


def test_a_replica_takes_the_place_of_a_primary_that_died(cluster: EmbeddedCluster) -> None:
    with client_of(cluster) as client:
        client.set("key", "value")
        assert client.wait(1, 5000, target_nodes=client.get_node_from_key("key")) == 1
        holder = client.get_node_from_key("key")
    assert holder is not None
    (dead,) = [node for node in cluster.nodes if node.port == holder.port]
    dead.kill()

    def reads() -> bool:
        try:
            with client_of(cluster) as client:
                return bool(client.get("key") == b"value")
        except redis.RedisError:
            return False

    wait_until(reads)
    dead.start()


def test_a_port_that_somebody_took_is_replaced(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(tmp_path)
    taken = cluster.nodes[1]
    port = taken.port
    assert port is not None
    with socket.create_server(("127.0.0.1", port)), cluster:
        assert taken.port != port
        assert cluster.is_ready()


def test_a_cluster_needs_three_primaries(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a cluster of 2 primaries: needs at least 3"):
        EmbeddedCluster(tmp_path, primaries=2)


def test_a_cluster_on_given_ports_has_them_in_a_row(tmp_path: Path) -> None:
    cluster = EmbeddedCluster(tmp_path, port=7000, replicas=0)
    assert cluster.url == "redis://127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002/0"
    assert [node.directives["cluster-port"] for node in cluster.nodes] == ["17000", "17001", "17002"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"port": 55_530}, "port 55530: the 6 nodes also need those from 65530 on"),
        ({"bind": "0.0.0.0", "password": "x"}, "bind address '0.0.0.0': nodes name it to clients"),
    ],
)
def test_arguments_that_no_cluster_can_have_are_refused(tmp_path: Path, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        EmbeddedCluster(tmp_path, **given)
