"""A Prometheus that scrapes a `rollq metrics`, with the alerts of compose/alerts.yaml."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollq.buffer.common.ports import free_port
from support.compose_file import COMPOSE
from support.waiting import wait_until

RULES = COMPOSE / "alerts.yaml"


def impatient_rules() -> str:
    """The alerts, which fire after one second, by rates of the last 15 seconds."""
    rules = re.sub(r"for: \d+m", "for: 1s", RULES.read_text("utf-8"))
    return rules.replace("[10m]", "[15s]")


class Prometheus:
    """A running Prometheus at `address`."""

    def __init__(self, address: str) -> None:
        self._address = address

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that fire or wait."""
        with urllib.request.urlopen(f"{self._address}/api/v1/alerts", timeout=60) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["alerts"]
        return found

    def until_firing(self, name: str) -> dict[str, Any]:
        """Wait until an alert fires, and return it."""
        firing: list[dict[str, Any]] = []

        def fires() -> bool:
            firing[:] = [a for a in self.alerts() if a["labels"]["alertname"] == name and a["state"] == "firing"]
            return bool(firing)

        wait_until(fires, otherwise=self.alerts)
        return firing[0]

    def until_silent(self, name: str) -> None:
        """Wait until an alert neither fires nor waits."""
        wait_until(lambda: all(alert["labels"]["alertname"] != name for alert in self.alerts()), otherwise=self.alerts)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            urllib.request.urlopen(f"{self._address}/-/ready", timeout=60).close()
        except OSError:
            return False
        return True


@contextmanager
def watching(program: Path, folder: Path, metrics: str) -> Iterator[Prometheus]:
    """Prometheus with the impatient alerts, in `folder`, which scrapes the address `metrics` each second."""
    (folder / "alerts.yaml").write_text(impatient_rules(), "utf-8")
    (folder / "prometheus.yaml").write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yaml]\n"
        f"scrape_configs: [{{job_name: rollq, static_configs: [{{targets: ['{metrics.removeprefix('http://')}']}}]}}]\n",
        "utf-8",
    )
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [
        str(program), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={address}", "--log.level=warn",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            running = Prometheus(f"http://{address}")
            wait_until(lambda: process.poll() is not None or running.is_ready())
            assert process.poll() is None, (folder / "prometheus.log").read_text("utf-8")
            yield running
        finally:
            process.kill()
