"""`python -m benchmarks.roles`: the memory and the connections of each role while it has nothing to do. Each role is
alone with a server, so all connections belong to it. The settings come from `rollq demo`; an engine needs more memory
for a larger model.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import psutil
import redis

from benchmarks.world import server
from rollq.buffer.buffer import Buffer
from rollq.buffer.common.ports import free_port
from rollq.monitor.text.tables import aligned

HEADER = ("role", "MB", "connections")
ROLES: Mapping[str, tuple[str, ...]] = {
    "producer": ("produce", "rollq.toml"),
    "worker, engine `simulated`": ("work", "simulated.toml"),
    "worker, engine `transformers`": ("work", "rollq.toml"),
    "trainer": ("train", "rollq.toml"),
    "metrics, scraped once": ("metrics", "rollq.toml", "--port"),
}
SETTLED_S = 30.0
"""Seconds that a role has before it is measured; importing torch takes the longest."""
ROLLQ = (sys.executable, "-m", "rollq.cli.main")


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "demo"
        prepare(folder)
        rows = [(role, *measure(folder, arguments)) for role, arguments in ROLES.items()]
    print("\n".join(aligned([HEADER, *rows])))


def prepare(folder: Path) -> None:
    """Write the demo's settings to `folder`, and the same settings with the engine that needs no model."""
    command = [*ROLLQ, "demo", "--prepare", "--out", str(folder), "--warm-up-steps", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    text = re.sub(r"\[worker\.options\]\n(\w.*\n)+", "", (folder / "rollq.toml").read_text("utf-8"))
    (folder / "simulated.toml").write_text(text.replace("[worker]", '[worker]\nengine = "simulated"'), "utf-8")


def measure(folder: Path, arguments: tuple[str, ...]) -> tuple[str, str]:
    """Memory in MB and connections of a role that is alone with a server."""
    port = str(free_port("127.0.0.1"))
    command = [*ROLLQ, *arguments, *([port] if arguments[-1] == "--port" else [])]
    with server() as running, redis.Redis.from_url(running.url) as client:
        environment = {**os.environ, "ROLLQ_REDIS_URL": running.url}
        with Buffer.connect(running.url, "demo") as buffer:
            buffer.create_run()  # for the one that only reads
        role = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.DEVNULL)
        try:
            time.sleep(SETTLED_S)
            if arguments[0] == "metrics":
                urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").close()
            connections = len(client.client_list()) - 1
            return f"{psutil.Process(role.pid).memory_info().rss / 1e6:.0f}", str(connections)
        finally:
            role.terminate()
            role.wait()


if __name__ == "__main__":
    main()
