"""Describes the machine that the benchmarks run on."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import redis

from benchmarks.world import server


def describe() -> dict[str, str | int]:
    """Return the CPU, its cores, the operating system, the versions of Python, server, clients and RQ, and the date."""
    with server() as running, redis.Redis.from_url(running.url) as client:
        valkey = client.info("server")["valkey_version"]
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "server": f"Valkey {valkey}, append-only file everysec",
        "client": f"redis-py {version('redis')}, hiredis {version('hiredis')}",
        "rq": version("rq"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def load_per_core() -> float:
    """Runnable processes per core over the last minute; above 1, other work is competing for the machine."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _cpu_model() -> str:
    """The CPU's name according to the kernel, or to the platform if there is no /proc."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()
