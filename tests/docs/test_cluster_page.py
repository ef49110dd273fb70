"""docs/guide/cluster.md: its servers start, its settings reach them, and a run works on when a node is killed."""

import os
import re
import signal
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.store.keys import task_keys
from rollq.cli.settings.file import load_settings
from rollq.monitor.report.records import METRICS_FILE
from support.documented_commands import ROOT, Desk, blocks, steps_trained, terminals
from support.free_ports import free_ports

PAGE = ROOT / "docs" / "guide" / "cluster.md"
NODES = 6


def at(first: int, code: str) -> str:
    """`code` with the nodes' ports from `first` on."""
    return re.sub(r"\b700(\d)\b", lambda port: str(first + int(port[1])), code)


@pytest.fixture
def settings(desk: Desk, sums: Path) -> tuple[Path, int]:
    """The demo's settings with the page's URLs, and the port of the first node."""
    first = free_ports(NODES)
    (urls,) = [block.code for block in blocks(PAGE) if block.language == "toml" and "buffer_url" in block.code]
    text = (sums / "rollq.toml").read_text("utf-8")
    path = sums / "rollq.toml"
    path.write_text(re.sub(r"\[redis\]\nbuffer_url = .*\n", desk.local(at(first, urls)), text), "utf-8")
    return path, first


@pytest.mark.long
def test_a_run_on_the_cluster_of_the_page_outlives_a_node(desk: Desk, settings: tuple[Path, int]) -> None:
    path, first = settings
    config = load_settings(path, {})
    metrics = path.parent / "trainer" / METRICS_FILE
    cluster, queue = terminals(PAGE)
    with desk:
        desk.open("cluster", at(first, cluster))
        desk.open("queue", queue)
        for name in ("cluster", "queue"):
            desk.wait_until(lambda name=name: b"serving at" in desk.log(name).read_bytes())  # type: ignore[misc]
        for role in ("produce", "work", "train"):
            desk.open(role, f"rollq {role} rollq.toml", "sums")
        desk.wait_until(lambda: steps_trained(metrics) >= 2)
        with Buffer.connect(config.redis.buffer_url, config.run) as buffer:
            task = next(iter(config.tasks))
            node = buffer.servers.of(task_keys(config.run, task).clock)
            os.kill(int(node.info("server")["process_id"]), signal.SIGKILL)
            trained = steps_trained(metrics)
            desk.wait_until(lambda: steps_trained(metrics) >= trained + 2)
            assert buffer.counts(task).clock.committed >= trained + 2
            assert buffer.servers.of(task_keys(config.run, task).clock) is not node
        assert "exited by itself" in desk.log("cluster").read_text()
        shown = desk.run(
            f"ROLLQ_QUEUE_URL={config.redis.queue_url} rollq status --url {config.redis.buffer_url} --run {config.run}"
        )
        assert f"\nrun {config.run}: version " in shown
