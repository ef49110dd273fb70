"""Examines a run: reads and checks the facts about its servers, groups and folders."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import redis
from redis import exceptions as driver

from rollq.buffer.errors import RunMismatch, ServerError, StoreLost
from rollq.buffer.payloads import cluster, object_payloads
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.keys import RunKeys, task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.store.redis_url import address
from rollq.buffer.store.servers import Servers
from rollq.buffer.values.rollouts import Status
from rollq.buffer.weights.store import MAX_REDIS_BYTES
from rollq.buffer.wire import compiled
from rollq.monitor.doctor.checks import (
    Check,
    check_payloads,
    check_sizing,
    check_weights_folder,
    check_weights_in_redis,
)
from rollq.monitor.doctor.facts import SETTINGS, ServerFacts, read_facts, read_space
from rollq.monitor.doctor.findings import Finding, Level
from rollq.monitor.doctor.payloads import read_payload_facts
from rollq.monitor.doctor.sizing import TaskSize, live_groups, outside_bytes, primary_bytes, salvaged_groups, used_bytes
from rollq.monitor.text.units import in_words

PATIENCE = Patience(unanswered_s=2.0, unready_s=2.0)
"""A server that is down for longer than this is a finding."""
MEASURED_GROUPS = 32
FINISHED = (Status.COMPLETED, Status.ARCHIVED, Status.CLAIMED)


@dataclass(frozen=True, slots=True)
class Weights:
    """How weights are sent: through `folder`, or through Redis if it is None. `kept` is the number of versions kept
    there."""

    folder: Path | None
    model_bytes: int
    kept: int

    @property
    def needed_bytes(self) -> int:
        """The room for the kept versions and the next version."""
        return (self.kept + 1) * self.model_bytes


def examine_server(
    client: redis.Redis, checks: Sequence[Check], patience: Patience = PATIENCE, settings: Path = SETTINGS
) -> tuple[ServerFacts | None, list[Finding]]:
    """The facts about a server and the findings; no facts and one finding for an unusable server."""
    try:
        facts = read_facts(client, patience, settings=settings)
    except ServerError as error:
        return None, [Finding("server", Level.ERROR, str(error).removeprefix(f"{address(client)}: "))]
    return facts, [check(facts) for check in checks]


@dataclass(frozen=True, slots=True)
class Sizing:
    """The sizes of a run's tasks, by name. `measured` counts the tasks with measured groups."""

    tasks: Mapping[str, TaskSize]
    measured: int


def read_sizing(servers: Servers, run: str, planned: Mapping[str, TaskSize] | None) -> Sizing:
    """The tasks' sizes planned in the settings, or else the stored sizes.

    A group's payload is measured on the run's finished groups, if they can be read.
    """
    stored = _stored_tasks(servers, run)
    if planned is None:
        return Sizing(stored, len(stored))
    return Sizing({task: with_payload(size, stored.get(task)) for task, size in planned.items()}, len(stored))


def examine_sizing(
    servers: Servers, client: redis.Redis, run: str, facts: ServerFacts, sizing: Sizing, weights: Weights | None
) -> Finding:
    """Compare the memory of one server, behind `client`, with the memory that the run may take there."""
    if not sizing.tasks:
        return Finding("sizing", Level.NOTE, "no finished group to measure: give FILE, whose limits are the worst case")
    sizes, why = list(sizing.tasks.values()), _description(sizing)
    in_redis = _bytes_in_redis(weights)
    if not servers.spread:
        return check_sizing(facts, used_bytes(sizes, weights_bytes=in_redis), why)
    here = [size for task, size in sizing.tasks.items() if _has(servers, client, task_keys(run, task).clock)]
    weights_bytes = in_redis if _has(servers, client, RunKeys(run).info) else 0
    used = primary_bytes(here, sizes, len(servers.primaries()), weights_bytes=weights_bytes)
    return check_sizing(facts, used, f"{why}; this primary has {len(here)} of {len(sizes)} tasks")


def _has(servers: Servers, client: redis.Redis, key: str) -> bool:
    """Whether the server of `client` has `key`."""
    try:
        return servers.of(key) is client
    except driver.ClusterDownError:  # no server has it
        return False


def _stored_tasks(servers: Servers, run: str) -> dict[str, TaskSize]:
    """The tasks whose groups could be measured; empty if the run does not exist, belongs to another release, or is not
    readable."""
    try:
        sizes = measured_tasks(MonitorBuffer(servers, run, PATIENCE))
    except (StoreLost, RunMismatch, ServerError):
        return {}
    return {task: size for task, size in sizes.items() if size.payload_bytes}


def with_payload(planned: TaskSize, stored: TaskSize | None) -> TaskSize:
    """`planned` with the measured payload and the inserted groups, if any."""
    if stored is None:
        return planned
    return replace(
        planned,
        payload_bytes=stored.payload_bytes,
        surplus_groups=max(planned.surplus_groups, stored.surplus_groups),
        spread_bytes=stored.spread_bytes,
        outside_bytes=stored.outside_bytes,
    )


def measured_tasks(buffer: MonitorBuffer) -> dict[str, TaskSize]:
    """The trained tasks of a run by name, with a payload of 0 if no group is finished. Raises `StoreLost`."""
    sizes = {}
    for task in buffer.train_tasks():
        rules = buffer.rules(task)
        payload_bytes, away_bytes = _measured_payload(buffer, task)
        waiting = buffer.counts(task).statuses.get(Status.COMPLETED, 0)
        sizes[task] = TaskSize(
            rules,
            payload_bytes,
            checkpoint_steps=rules.max_uncheckpointed_steps,
            surplus_groups=waiting if rules.offline else 0,  # no bound holds for insertions
            spread_bytes=away_bytes[cluster.PLACE],
            outside_bytes=away_bytes[object_payloads.PLACE],
        )
    return sizes


def _bytes_in_redis(weights: Weights | None) -> int:
    return weights.needed_bytes if weights and weights.folder is None else 0


def _measured_payload(buffer: MonitorBuffer, task: str) -> tuple[int, Counter[str]]:
    """The newest finished groups' mean encoded bytes, 0 without such groups, and their bytes outside the server, by
    place."""
    keys = task_keys(buffer.run, task)
    newest: list[Command] = [("ZRANGE", keys.status(status), -MEASURED_GROUPS, -1) for status in FINISHED]
    ids = list(map(int, chain.from_iterable(buffer.send_all(newest))))[:MEASURED_GROUPS]
    texts: list[Command] = [("HSTRLEN", keys.group(each), field) for each in ids for field in ("prompt", "rows")]
    fields: list[Command] = [("HMGET", keys.group(each), "bytes", "payload", "payload_bytes") for each in ids]
    records = buffer.send_all(fields)
    total = sum(buffer.send_all(texts)) + sum(int(size) for size, *_ in records if size)
    away = _bytes_away(task, records)
    return _share(total, ids), Counter({place: _share(size, ids) for place, size in away.items()})


def _bytes_away(task: str, records: Iterable[tuple[Any, bytes | None, Any]]) -> Counter[str]:
    """Bytes of payloads by their place."""
    away = Counter[str]()
    for _, payload, payload_bytes in records:
        if name := PayloadName.parse(task, (payload or b"").decode()):
            away[name.place] += int(payload_bytes)
    return away


def _share(total_bytes: int, groups: Sequence[int]) -> int:
    return total_bytes // max(1, len(groups))


def _description(sizing: Sizing) -> str:
    sizes = sizing.tasks.values()
    groups = sum(map(live_groups, sizes))
    each = in_words(sum(live_groups(size) * size.payload_bytes for size in sizes) / groups)
    salvaged, outside = sum(map(salvaged_groups, sizes)), outside_bytes(sizes)
    counted = f"{groups:,} groups of {each}"
    counted += f" ({in_words(outside / groups)} outside)" if outside else ""
    counted += f", {salvaged:,} of them in parts too" if salvaged else ""
    if sizing.measured == 0:
        return f"{counted}, if all samples reach their limits"
    return f"{counted}, as measured{'' if sizing.measured >= len(sizes) else ' in some tasks'}"


def examine_run(servers: Servers, run: str, *, is_named: bool) -> Iterator[Finding]:
    """Say that the run does not exist; with `is_named`, when a user named it, this is a problem."""
    try:
        _ = MonitorBuffer(servers, run, PATIENCE).incarnation
    except StoreLost:
        if is_named:
            yield Finding("run", Level.WARNING, f"run {run!r} does not exist here: name another, or start its roles")
        else:
            yield Finding("run", Level.NOTE, f"run {run!r} does not exist yet: its first role creates it")
    except (RunMismatch, ServerError):  # it exists, or the findings about the server give the reason
        return


def examine_payloads(servers: Servers, run: str, settings: PayloadSettings, sizing: Sizing) -> Iterator[Finding]:
    """Check the folder or the bucket for large payloads, if it exists or should exist.

    A folder needs room for the limit in the settings or, without a limit, for the run's maximum there.
    """
    facts = read_payload_facts(servers, run, settings, PATIENCE)
    if settings.url or facts.trouble:
        most_bytes = settings.max_buffer_bytes or outside_bytes(sizing.tasks.values())
        yield check_payloads(facts, settings.url or "", most_bytes)


def examine_weights(weights: Weights) -> Iterator[Finding]:
    """Check how weights are sent."""
    if weights.folder is None:
        yield check_weights_in_redis(weights.model_bytes, MAX_REDIS_BYTES)
    else:
        yield check_weights_folder(read_space(weights.folder), weights.needed_bytes)


def examine_codec() -> Iterator[Finding]:
    """Check that the codec of this installation is compiled."""
    if compiled.passes is None:
        yield Finding(
            "codec",
            Level.NOTE,
            "the fast path of the codec was not compiled for this version of rollq, so this machine needs about twice "
            "as long to send a small group: install gcc and Python's headers (python3-dev), then install rollq again",
        )
