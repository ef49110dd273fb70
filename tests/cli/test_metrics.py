"""`rollq metrics`: what Prometheus gets from a real run, and from one that is not there, or whose server went away."""

import http.client
import json
import re
import sys
import urllib.request

import pytest
from click.testing import CliRunner
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from support.buffer_run import World
from support.dashboard import serving
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forks")

ACCEPT = "application/openmetrics-text;version=1.0.0"


def get(address: str) -> tuple[int, str]:
    with urllib.request.urlopen(urllib.request.Request(address, headers={"Accept": ACCEPT}), timeout=60) as answer:
        return answer.status, answer.read().decode()


def scraped(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    status, text = get(f"{address}/metrics")
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until_up(address: str, run: str, up: float) -> None:
    wait_until(lambda: scraped(address)["rollq_up", frozenset({("run", run)})] == up)


def test_a_run_is_served(buffer: Buffer, server_url: str) -> None:
    world = World(buffer).start(math={})
    world.complete(3)
    world.admit(2)
    buffer.report_worker("worker-1", {"state": "serving", "in_flight": 2, "groups": 3})
    with serving("--url", server_url, "--run", buffer.run, name="metrics") as address:
        found = scraped(address)
        task = {("run", buffer.run), ("task", "math")}
        assert found["rollq_up", frozenset({("run", buffer.run)})] == 1
        assert found["rollq_groups", frozenset(task | {("status", "completed")})] == 3
        assert found["rollq_groups", frozenset(task | {("status", "pending")})] == 2
        assert found["rollq_ready_groups", frozenset(task)] == 3
        assert found["rollq_admitted_groups_total", frozenset(task)] == 5
        assert found["rollq_worker_groups", frozenset({("run", buffer.run), ("worker", "worker-1")})] == 2
        assert get(f"{address}/healthz") == (200, "ok\n")


def test_a_run_that_comes_and_a_server_that_goes_are_up_and_down(fresh_server: EmbeddedServer) -> None:
    with serving("--url", fresh_server.url, "--run", "sums", name="metrics") as address:
        assert scraped(address) == {("rollq_up", frozenset({("run", "sums")})): 0}
        with Buffer.connect(fresh_server.url, "sums") as buffer:
            World(buffer).start(math={})
        wait_until_up(address, "sums", 1)
        fresh_server.stop()
        wait_until_up(address, "sums", 0)
        assert get(f"{address}/healthz") == (200, "ok\n")


def test_a_port_that_is_taken_is_named(server: EmbeddedServer) -> None:
    port = re.search(r":(\d+)", server.url.removeprefix("redis://"))
    assert port is not None
    done = CliRunner().invoke(main, ["metrics", "--url", server.url, "--run", "sums", "--port", port[1]])
    assert done.exit_code == 2
    assert f"--host 127.0.0.1 --port {port[1]}: cannot listen there" in done.output


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rollq.monitor.metrics.app", None)
    done = CliRunner().invoke(main, ["metrics", "--url", "redis://127.0.0.1:1/0", "--run", "sums"])
    assert done.exit_code == 2
    assert "pip install 'rollq[dashboard]'" in done.output


def test_another_name_is_answered_once_it_is_allowed(buffer: Buffer, server_url: str) -> None:
    World(buffer).start(math={})
    given = ("--url", server_url, "--run", buffer.run, "--allowed-host", "prometheus.example")
    with serving(*given, name="metrics") as address:
        for host, status in (("prometheus.example:9464", 200), ("evil.example", 421)):
            connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
            connection.request("GET", "/metrics", headers={"Host": host})
            answer = connection.getresponse()
            assert answer.status == status
            assert (b"--allowed-host evil.example" in answer.read()) == (status == 421)
            connection.close()


def test_what_somebody_else_has_written_hides_nothing(buffer: Buffer, server_url: str) -> None:
    World(buffer).start(math={})
    buffer.report_worker("worker-1", {"state": "serving", "in_flight": 2})
    for name in (b"\xff", b'a"b\n', b"ghost"):
        buffer.client.sadd(buffer.keys.tasks, name)
    for worker, in_flight in (("worker-2", "many"), ("worker-3", [1]), ('"\n{', 7)):
        buffer.client.hset(
            buffer.keys.workers,
            worker,
            f"{buffer.server_ms()} {json.dumps({'state': 'serving', 'in_flight': in_flight})}",
        )
    with serving("--url", server_url, "--run", buffer.run, name="metrics") as address:
        found = scraped(address)
    run = ("run", buffer.run)
    assert found["rollq_up", frozenset({run})] == 1
    assert found["rollq_ready_groups", frozenset({run, ("task", "math")})] == 0
    groups = {dict(labels)["worker"]: value for (name, labels), value in found.items() if name == "rollq_worker_groups"}
    assert groups == {"worker-1": 2, '"\n{': 7}
