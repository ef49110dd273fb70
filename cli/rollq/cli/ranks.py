"""`rollq train --ranks N`: starts the ranks of a trainer on this machine, and ends them together.

On a request to stop, and unlike with torchrun, a checkpoint gets all the time that it needs.
"""

import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rollq.buffer.errors import ConfigError, RollqError
from rollq.cli.signals import forward_signals
from rollq.consumer.launch import LAUNCHER

log = logging.getLogger(__name__)

END_WITHIN_S = 5.0
"""How long ranks may take to exit after another rank has failed, in seconds. They would wait for that rank forever."""


def run_ranks(count: int, arguments: Sequence[str]) -> None:
    """Run `rollq train` with `arguments` in `count` processes until all have exited.

    SIGTERM and SIGINT are passed on to all processes, and the second signal kills them. Raises `RollqError` if a rank
    fails; the other ranks are then stopped.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError("--ranks: another launcher, such as torchrun, has started this process: leave --ranks out")
    common = {**_environment(count), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks: list[subprocess.Popen[bytes]] = []
    with forward_signals(ranks):
        try:
            for rank in range(count):
                ranks.append(_start(rank, arguments, common))
            log.info("started %d ranks: processes %s", count, ", ".join(str(rank.pid) for rank in ranks))
            failed = _first_failure(ranks)
        finally:
            _end(ranks)
    if failed is not None:
        code = ranks[failed].returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        raise RollqError(f"rank {failed} {how}; the other ranks were stopped: run the same command again")


def _environment(count: int) -> Mapping[str, str]:
    """The environment of all ranks: where they meet, and a fair share of the cores."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": threads}


def _start(rank: int, arguments: Sequence[str], common: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    # in a new session: the terminal sends Ctrl-C to the launcher alone, which passes it on once
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "rollq.consumer.launch", *arguments],
        env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), LAUNCHER: str(os.getpid())},
        start_new_session=True,
    )


def _first_failure(ranks: Sequence["subprocess.Popen[bytes]"]) -> int | None:
    """Wait for the ranks; return the first rank that fails, or None once all have succeeded."""
    running = {os.pidfd_open(rank.pid): rank for rank in ranks}
    try:
        while running:
            ended, _, _ = select.select(running, [], [])
            for descriptor in ended:
                os.close(descriptor)
                running.pop(descriptor).wait()
            if failed := [rank for rank in range(len(ranks)) if ranks[rank].returncode]:
                # a killed rank makes the others fail, not the other way round
                return next((rank for rank in failed if ranks[rank].returncode < 0), failed[0])
        return None
    finally:
        for descriptor in running:
            os.close(descriptor)


def _end(ranks: Sequence["subprocess.Popen[bytes]"]) -> None:
    deadline_s = time.monotonic() + END_WITHIN_S
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
