"""A new version that makes 10,000 of 1,000,000 groups stale: effective at once, swept without blocking the server."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis

from benchmarks.fill import fill, in_bulk
from benchmarks.results import Result
from benchmarks.world import TASK, run, server
from rollq.buffer.rules.settings import TaskRules

GROUP_SIZE = 8
TOTAL = 1_000_000
STALE = 10_000
LOGGED_US = 100
"""Shorter calls do not appear in the slow log."""


def measure(quick: bool) -> list[Result]:
    """Three results: the time from publishing until readiness excludes the stale groups, the whole sweep, and its
    longest call."""
    total, stale, bumps = (20_000, 1_000, 2) if quick else (TOTAL, STALE, 9)
    effective_ms, sweep_s, longest_ms, ping_ms = [], [], [], []
    rules = TaskRules(batch_groups=256, group_size=GROUP_SIZE, max_staleness=0)
    with server() as running, run(running.url, "bump", rules) as (buffer, epoch):
        # the groups of version v are too old as soon as v + 1 is published
        with in_bulk(buffer.client):
            fill(buffer, [*((v, stale) for v in range(bumps)), (bumps, total - bumps * stale)], GROUP_SIZE)
        ready = total
        for version in range(1, bumps + 1):
            started = time.perf_counter()
            buffer.publish(epoch, version, uri="", digest=str(version))
            counted = buffer.counts(TASK).ready
            effective_ms.append((time.perf_counter() - started) * 1e3)
            ready -= stale
            if counted != ready:
                raise RuntimeError(f"{counted} groups are ready, {ready} are fresh")
            with watched(running.url) as observed:
                started = time.perf_counter()
                expired = buffer.expire(TASK)
                sweep_s.append(time.perf_counter() - started)
            if expired != stale:
                raise RuntimeError(f"{expired} groups were swept, {stale} are stale")
            longest_ms.append(observed.longest_call_ms)
            ping_ms.append(observed.longest_ping_ms)
    bump = f"version bump that expires {stale:,} of {total:,}"
    return [
        Result("expiry-effective", f"{bump}: until readiness excludes them", "ms", 5.0, "lower", tuple(effective_ms)),
        Result("expiry-sweep", f"{bump}: the sweep", "s", 1.0, "lower", tuple(sweep_s)),
        Result(
            name="expiry-hold",
            what=f"{bump}: longest call of the sweep, on the server",
            unit="ms",
            target=10.0,
            better="lower",
            values=tuple(longest_ms),
            details={"worst_call_ms": max(longest_ms), "worst_ping_of_another_client_ms": max(ping_ms)},
        ),
    ]


class Observed:
    """The result of `watched`."""

    longest_call_ms = 0.0
    longest_ping_ms = 0.0


@contextmanager
def watched(url: str) -> Iterator[Observed]:
    """Ping the server continuously from another client, and find the longest function call in its slow log."""
    observed, ended = Observed(), threading.Event()
    with redis.Redis.from_url(url) as client:
        client.config_set("slowlog-log-slower-than", LOGGED_US)
        client.config_set("slowlog-max-len", 10_000)
        client.slowlog_reset()

        def ping() -> None:
            while not ended.is_set():
                started = time.perf_counter()
                client.ping()
                observed.longest_ping_ms = max(observed.longest_ping_ms, (time.perf_counter() - started) * 1e3)

        pinger = threading.Thread(target=ping, daemon=True)
        pinger.start()
        yield observed
        ended.set()
        pinger.join()
        calls = [entry["duration"] for entry in client.slowlog_get(10_000) if entry["command"].startswith(b"FCALL")]
        observed.longest_call_ms = max(calls, default=LOGGED_US) / 1e3
        client.config_set("slowlog-log-slower-than", -1)
