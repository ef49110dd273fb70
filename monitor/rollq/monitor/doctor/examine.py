"""Examines a run: reads the facts about its servers, its groups and its folders, and checks them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import redis

from rollq.buffer.errors import RunMismatch, ServerError, StoreLost
from rollq.buffer.roles import MonitorBuffer
from rollq.buffer.rollouts import WHOLE, Status
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.store.redis_url import address
from rollq.buffer.store.servers import Servers
from rollq.buffer.weights.store import MAX_REDIS_BYTES
from rollq.monitor.doctor.checks import Check, check_sizing, check_weights_folder, check_weights_in_redis
from rollq.monitor.doctor.facts import SETTINGS, ServerFacts, read_facts, read_space
from rollq.monitor.doctor.findings import Finding, Level
from rollq.monitor.doctor.sizing import TaskSize, live_groups, salvaged_groups, used_bytes
from rollq.monitor.units import in_words

PATIENCE = Patience(unanswered_s=2.0, unready_s=2.0)
"""A server that is away for longer is a finding."""
MEASURED_GROUPS = 32
FINISHED = (Status.COMPLETED, Status.ARCHIVED, Status.CLAIMED)


@dataclass(frozen=True, slots=True)
class Weights:
    """How weights travel: through `folder`, or through Redis where it is None. `kept` counts the versions there."""

    folder: Path | None
    model_bytes: int
    kept: int

    @property
    def needed_bytes(self) -> int:
        """Room for the versions that are kept, and the next one."""
        return (self.kept + 1) * self.model_bytes


def examine_server(
    client: redis.Redis, checks: Sequence[Check], patience: Patience = PATIENCE, settings: Path = SETTINGS
) -> tuple[ServerFacts | None, list[Finding]]:
    """The facts about a server and the findings; no facts and one finding where it cannot be used."""
    try:
        facts = read_facts(client, patience, settings=settings)
    except ServerError as error:
        return None, [Finding("server", Level.ERROR, str(error).removeprefix(f"{address(client)}: "))]
    return facts, [check(facts) for check in checks]


def examine_sizing(
    servers: Servers, run: str, facts: ServerFacts, planned: Mapping[str, TaskSize] | None, weights: Weights | None
) -> Finding:
    """Compare the server's memory with what the run may take: as planned in its settings, else as it is stored.

    The payload of a group is measured on the groups that the run has finished, where they can be read.
    """
    stored = _stored_tasks(servers, run)
    if planned is None:
        sizes = list(stored.values())
    else:
        sizes = [with_payload(size, stored.get(task)) for task, size in planned.items()]
    if not sizes:
        return Finding("sizing", Level.NOTE, "no finished group to measure: give FILE, whose limits are the worst case")
    in_redis = weights.needed_bytes if weights and weights.folder is None else 0
    used = used_bytes(sizes, weights_bytes=in_redis)
    return check_sizing(facts, used, _description(sizes, measured=len(stored)))


def _stored_tasks(servers: Servers, run: str) -> dict[str, TaskSize]:
    """The tasks whose groups could be measured; none where the run does not exist, is another release's, or may not be
    read."""
    try:
        sizes = measured_tasks(MonitorBuffer(servers, run, PATIENCE))
    except (StoreLost, RunMismatch, ServerError):
        return {}
    return {task: size for task, size in sizes.items() if size.payload_bytes}


def with_payload(planned: TaskSize, stored: TaskSize | None) -> TaskSize:
    """`planned` with the payload that was measured, where there is one."""
    return replace(planned, payload_bytes=stored.payload_bytes) if stored else planned


def measured_tasks(buffer: MonitorBuffer) -> dict[str, TaskSize]:
    """The trained tasks of a run by name, with a payload of 0 where no group is finished. Raises `StoreLost`."""
    sizes = {}
    for task in buffer.train_tasks():
        rules = buffer.rules(task)
        payload_bytes = _measured_payload(buffer, task, rules.group_size)
        sizes[task] = TaskSize(rules, payload_bytes, checkpoint_steps=rules.max_uncheckpointed_steps)
    return sizes


def _measured_payload(buffer: MonitorBuffer, task: str, group_size: int) -> int:
    """Mean encoded bytes of the newest finished groups; 0 without any."""
    keys = task_keys(buffer.run, task)
    found = buffer.send_all([("ZRANGE", keys.status(status), -MEASURED_GROUPS, -1) for status in FINISHED])
    ids = [int(group_id) for group_ids in found for group_id in group_ids][:MEASURED_GROUPS]
    if not ids:
        return 0
    fields = (WHOLE, *range(group_size))
    commands: list[Command] = [("HSTRLEN", keys.rollout(each), field) for each in ids for field in fields]
    commands += [("HSTRLEN", keys.group(each), "prompt") for each in ids]
    names = buffer.send_all([("HGET", keys.group(each), "payload") for each in ids])
    commands += [("STRLEN", keys.payload(each, name.decode())) for each, name in zip(ids, names, strict=True) if name]
    return sum(map(int, buffer.send_all(commands))) // len(ids)


def _description(sizes: Sequence[TaskSize], *, measured: int) -> str:
    groups = sum(map(live_groups, sizes))
    each = in_words(sum(live_groups(size) * size.payload_bytes for size in sizes) / groups)
    salvaged = sum(map(salvaged_groups, sizes))
    counted = f"{groups:,} groups of {each}" + (f", {salvaged:,} of them also in parts" if salvaged else "")
    if measured == 0:
        return f"{counted}, if all samples reach their limits"
    return f"{counted}, as measured{'' if measured >= len(sizes) else ' in some tasks'}"


def examine_weights(weights: Weights) -> Iterator[Finding]:
    """Check the way that weights take."""
    if weights.folder is None:
        yield check_weights_in_redis(weights.model_bytes, MAX_REDIS_BYTES)
    else:
        yield check_weights_folder(read_space(weights.folder), weights.needed_bytes)
