"""The cost of traces: the worker's processor time for a group, and the time of claims and commits.

Sides take turns: traces off, traces on with a collector that takes them, with a collector that hangs, and with a
collector that is gone; and, with `--before`, another tree, such as a tree without traces. Each turn is a run of real
roles: `rollq produce`, `rollq work` with an engine that takes no time, and a trainer in this process that claims while
they work.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import psutil
from safetensors.numpy import save_file

from benchmarks.world import server
from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.buffer.values.rollouts import Status
from rollq.consumer import Consumer, ConsumerSettings

ROOT = Path(__file__).parents[1]
PARTS = ("buffer", "producer", "workers", "consumer", "monitor", "cli", "integrations")
BATCH_GROUPS = 32
FROM, UNTIL = 200, 1400
"""The numbers of completed groups between which the worker's processor time is measured."""
CLAIMS = 30
SETTINGS = """
run = "traces"
[redis]
buffer_url = "{url}"
[tasks.math]
prompts = "p.jsonl"
batch_groups = {groups}
group_size = 8
max_staleness = 60
[worker]
engine = "simulated"
options = {{ lengths = [200], tokens_per_s = 1e9 }}
"""
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
ThreadingHTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""


@contextmanager
def process(*command: str, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that runs until the end of the context."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGCONT)
            started.terminate()


def play(folder: Path) -> dict[str, Any]:
    """One run, with the traces that the environment asks for; returns its figures."""
    (folder / "p.jsonl").write_text("".join(f'{{"prompt": "{row} + 1", "answer": "2"}}\n' for row in range(5000)))
    (folder / "model").mkdir()
    save_file({"w": np.zeros(4, np.float32)}, folder / "model" / "model.safetensors")
    with server() as running, ExitStack() as roles:
        (folder / "rollq.toml").write_text(SETTINGS.format(url=running.url, groups=BATCH_GROUPS))
        rollq = (sys.executable, "-m", "rollq.cli.main")
        buffer = roles.enter_context(Buffer.connect(running.url, "traces"))
        roles.enter_context(process(*rollq, "produce", "rollq.toml", log=folder / "produce.log"))
        while not buffer.client.exists(buffer.keys.info) or "math" not in buffer.tasks():
            time.sleep(0.05)
        weights, settings = folder / "model", ConsumerSettings(transport="redis")
        consumer = roles.enter_context(Consumer.connect(running.url, run="traces", weights=weights, settings=settings))
        worker = roles.enter_context(process(*rollq, "work", "rollq.toml", log=folder / "work.log"))
        used = psutil.Process(worker.pid)
        marks = [_mark(buffer, used, count) for count in (FROM, UNTIL)]
        (groups, cpu_s, at_s), (groups_then, cpu_then_s, then_s) = marks
        claims, commits = list[float](), list[float]()
        for _ in range(CLAIMS):
            began_s = time.perf_counter()
            batch = next(consumer)
            claims.append((time.perf_counter() - began_s) * 1000)
            began_s = time.perf_counter()
            consumer.commit(batch)
            commits.append((time.perf_counter() - began_s) * 1000)
    return {
        "cpu_ms": (cpu_then_s - cpu_s) / (groups_then - groups) * 1000,
        "groups_per_s": (groups_then - groups) / (then_s - at_s),
        "claims_ms": claims,
        "commits_ms": commits,
    }


def _mark(buffer: Buffer, used: psutil.Process, count: int) -> tuple[int, float, float]:
    while (groups := buffer.counts("math").statuses[Status.COMPLETED]) < count:
        time.sleep(0.02)
    return groups, sum(used.cpu_times()[:2]), time.perf_counter()


def environments(before: Path | None, port: int) -> Mapping[str, Mapping[str, str]]:
    """The environment of each side."""
    trees = {"off": ROOT} | ({} if before is None else {"before": before})
    paths = {name: ":".join(str(tree / part) for part in PARTS) + f":{ROOT}" for name, tree in trees.items()}
    on = {"PYTHONPATH": paths["off"], "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
    sides = {name: {"PYTHONPATH": path} for name, path in paths.items()}
    return {**sides, "on": on, "hangs": on, "gone": on}


def turn(side: str, environment: Mapping[str, str], port: int) -> dict[str, Any]:
    """One turn of a side, in a process with its environment."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "run").mkdir()
        if side in ("on", "hangs"):
            collector = process(sys.executable, "-c", COLLECTOR.format(port=port), log=folder / "collector.log")
            started = stack.enter_context(collector)
            time.sleep(1.0)
            if side == "hangs":
                started.send_signal(signal.SIGSTOP)
        command = [sys.executable, "-m", "benchmarks.traces", "--play", str(folder / "run")]
        output = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE)
        played: dict[str, Any] = json.loads(output.stdout.splitlines()[-1])
        return played


@click.command()
@click.option("--play", "folder", type=Path, help="Play one run in this folder, and print its figures.")
@click.option("--before", type=Path, help="Another tree, as one more side.")
@click.option("--turns", default=5, help="Turns of each side.")
def main(folder: Path | None, before: Path | None, turns: int) -> None:
    """Measure, and print a line of figures for each side."""
    if folder is not None:
        print(json.dumps(play(folder)))
        return
    port = free_port("127.0.0.1")
    sides = environments(before, port)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(turns):
        for side in sorted(sides, key=lambda name: (list(sides).index(name) + number) % len(sides)):
            found[side].append(turn(side, sides[side], port))
            print(side, json.dumps(found[side][-1]), file=sys.stderr, flush=True)
    for side, runs in found.items():
        claims = [ms for one in runs for ms in one["claims_ms"]]
        commits = [ms for one in runs for ms in one["commits_ms"]]
        print(
            f"{side:7} worker {median(one['cpu_ms'] for one in runs):.2f} ms of CPU a group, "
            f"{median(one['groups_per_s'] for one in runs):.0f} groups/s; claims {median(claims):.1f} ms, at most "
            f"{max(claims):.0f}; commits {median(commits):.1f} ms, at most {max(commits):.0f}"
        )


if __name__ == "__main__":
    main()
