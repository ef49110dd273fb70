"""Lists a server's runs, and deletes a run with everything that it has."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from rq import Queue
from rq.registry import BaseRegistry, FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.errors import ConfigError
from rollq.buffer.payloads.object_payloads import ObjectPayloads
from rollq.buffer.payloads.router import out_of_reach
from rollq.buffer.rules.names import is_name
from rollq.buffer.rules.shards import task_of
from rollq.buffer.store.connection import Patience, patiently
from rollq.buffer.store.keys import TaskKeys
from rollq.buffer.store.run_store import RunStore
from rollq.buffer.store.servers import Servers
from rollq.buffer.values.rollouts import Status

KEYS_PER_TRIP = 1000
LIVE_S = 30.0
"""A role that reported within this time is alive, in seconds."""
_RUN_OF_KEY = re.compile(rb"rollq:\{([^:}]+)")
_REGISTRIES: tuple[type[BaseRegistry], ...] = (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry)

Report = Callable[[int], None]
"""Called with the number of keys examined or removed so far."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run on a server.

    `groups` counts the groups in the buffer, and `unarchived` those that wait for an archive. `size_bytes` is the size
    of all frames, in any store. `keys` counts the keys on the servers, and `roles` lists the live roles. `state` says
    why roles cannot use the run, or is "".
    """

    run: str
    tasks: tuple[str, ...]
    groups: int
    unarchived: int
    size_bytes: int
    keys: int
    schema: int | None
    age_s: float | None
    roles: tuple[str, ...]
    state: str = ""


def find_runs(servers: Servers, patience: Patience, report: Report = lambda done: None) -> list[RunSummary]:
    """The runs with keys on these servers, by name. Scans all keys. Raises `ServerRefused` if the user may not scan."""
    counted: Counter[str] = Counter()
    for key in _scan(servers, patience, "rollq:{*", report):
        if matched := _RUN_OF_KEY.match(key):
            counted[matched[1].decode()] += 1
    return [summarize(RunStore(servers, run, patience), counted[run]) for run in sorted(counted)]


def runs_with_curves(servers: Servers, patience: Patience) -> list[str]:
    """Names of the runs on these servers that have curves. Scans all keys. Raises `ServerRefused` if the user may not
    scan."""
    keys = _scan(servers, patience, "rollq:{*}:curves")
    return sorted({matched[1].decode() for key in keys if (matched := _RUN_OF_KEY.match(key)) and is_name(matched[1])})


def _counts(store: RunStore, tasks: Sequence[TaskKeys]) -> list[dict[Status, int]]:
    """Each task's number of groups, by status."""
    groups = iter(store.send_all([("ZCARD", task.status(status)) for task in tasks for status in Status]))
    return [{status: next(groups) for status in Status} for _ in tasks]


def _times_of(reports: Iterable[bytes]) -> list[int]:
    """The time of each readable worker report, in ms."""
    times = [report.split(b" ", 1)[0] for report in reports]
    return [int(at_ms) for at_ms in times if at_ms.isdigit() and len(at_ms) < 20]


def summarize(store: RunStore, keys: int = 0) -> RunSummary:
    """Summarize a run, even one that roles cannot use, without counting its `keys`."""
    names = store.keys
    info, tasks, workers, trainer = store.send_all(
        [
            ("HMGET", names.info, "incarnation", "schema", "created_ms", "restoring", "deleting"),
            ("SMEMBERS", names.tasks),
            ("HVALS", names.workers),
            ("HMGET", names.trainer, "trainer_id", "deadline_ms"),
        ]
    )
    incarnation, schema, created_ms, restoring, deleting = info
    task_keys = [TaskKeys(store.run, task.decode()) for task in filter(is_name, sorted(tasks))]
    clocks = store.send_all([("HMGET", task.clock, "reaped_ms", "archive") for task in task_keys])
    taken = store.send_all([("HGET", task.progress, "bytes") for task in task_keys])
    counts = _counts(store, task_keys)
    now_ms = store.server_ms()
    reaped = [_whole(reaped_ms) for reaped_ms, _ in clocks]
    return RunSummary(
        run=store.run,
        tasks=tuple(dict.fromkeys(task_of(keys_of.task) for keys_of in task_keys)),
        groups=sum(map(sum, map(dict.values, counts))),
        unarchived=sum(map(_unarchived, counts, clocks)),
        size_bytes=sum(map(_whole, taken)),
        keys=keys,
        schema=_whole(schema) or None,
        age_s=(now_ms - int(created_ms)) / 1000 if created_ms else None,
        roles=tuple(_roles(now_ms, _times_of(workers), reaped, trainer)),
        state=_state(incarnation, restoring, deleting),
    )


def _whole(number: bytes | None) -> int:
    return int(number or 0)


def _unarchived(counts: Mapping[Status, int], clock: Sequence[bytes | None]) -> int:
    """The number of groups that a task's archive would lose if the run were deleted now."""
    _, archive = clock
    unwritten = (Status.ARCHIVED, Status.FAILED, Status.FILTERED) if archive == b"1" else ()
    return sum(counts[status] for status in (Status.LEAVING, *unwritten))


class Deletion(BufferCore):
    """The call that deletes a run."""

    def check_idle(self, summary: RunSummary) -> None:
        """Raise `ConfigError` if a role uses the run, and `ServerRefused` if the user may not search for its keys."""
        if summary.roles:
            raise ConfigError(f"run {self.run!r} is in use: {'; '.join(summary.roles)}. Stop its roles first")
        for client in self.servers.primaries():  # before anything is written
            self.servers.patiently(partial(client.scan, 0, "rollq:{*", 1), self._patience)

    def delete_run(self, queue: Queue, report: Report = lambda done: None, *, force: bool = False) -> None:
        """Delete the run: its keys, its payloads outside the servers, its tickets. Safe to repeat; after an interrupted
        deletion, no role can use the run until the call is repeated.

        Raises `ConfigError` if there is no such run, if a role still uses it (unless `force` is set: the role then ends
        with `StoreLost`), or if its payloads' folder or bucket is not configured.
        """
        summary = summarize(self)
        if summary.state == GONE:
            raise ConfigError(f"run {self.run!r} is not on this server: `rollq runs list` shows the runs that are")
        if not force:
            self.check_idle(summary)
        incarnation, payloads = self.send("HMGET", self.keys.info, "incarnation", "payloads")
        outside = self._outside(payloads, incarnation) if payloads else None
        ended = self.call("begin_delete", self.keys.info, incarnation or b"")
        self._remove_keys(report)
        if outside:
            outside.remove_run(self.payloads.folder(self._checked_incarnation(ended)))
        patiently(queue.connection, partial(_delete_queue, queue), self._patience)
        self.send("UNLINK", self.keys.info)

    def _outside(self, payloads: bytes, incarnation: bytes | None) -> ObjectPayloads:
        """The folder or bucket with the run's payloads. Raises `ConfigError` if it is not configured or lacks them."""
        outside = self.payloads.outside
        if outside is None:
            raise out_of_reach(self.run, payloads.decode())
        if incarnation:
            self._incarnation = self._checked_incarnation(incarnation)  # of any schema
            outside.check_marker()
        return outside

    def _remove_keys(self, report: Report) -> None:
        """Remove all keys except the one that identifies the run."""
        tasks = self.send("SMEMBERS", self.keys.tasks)
        # first, so that a role that wakes up during the search finds no clock, and creates no key that the search
        # misses
        self.send_all([("UNLINK", TaskKeys(self.run, task.decode()).clock) for task in tasks if is_name(task)])
        removed = 0
        for pattern in (f"rollq:{{{self.run}}}:*", f"rollq:{{{self.run}:*"):
            keys: list[bytes] = []
            for key in _scan(self.servers, self._patience, pattern):
                if key != self.keys.info.encode():
                    keys.append(key)
                if len(keys) == KEYS_PER_TRIP:
                    removed += self._unlink(keys)
                    report(removed)
                    keys = []
            removed += self._unlink(keys)
            report(removed)

    def _unlink(self, keys: list[bytes]) -> int:
        self.send_all([("UNLINK", key.decode()) for key in keys])
        return len(keys)


GONE = "its run is gone"
"""The state of keys that belong to no run."""
DELETING = "its deletion did not finish"
"""The state of a run that `delete_run` has not completely deleted."""


def _state(incarnation: bytes | None, restoring: bytes | None, deleting: bytes | None) -> str:
    if deleting is not None:
        return DELETING
    if restoring is not None:
        return "its restore did not finish"
    return "" if incarnation else GONE


def _roles(now_ms: int, reported: list[int], reaped: list[int], trainer: list[bytes | None]) -> Iterator[str]:
    trainer_id, deadline_ms = trainer
    if trainer_id and deadline_ms and (left_s := (int(deadline_ms) - now_ms) / 1000) > 0:
        yield f"trainer {trainer_id.decode()!r} holds it for another {left_s:.0f} s"
    live_from_ms = now_ms - LIVE_S * 1000
    if workers := sum(at_ms > live_from_ms for at_ms in reported):
        yield f"{workers} {'workers have' if workers > 1 else 'worker has'} reported within {LIVE_S:.0f} s"
    if max(reaped, default=0) > live_from_ms:
        yield f"a producer has checked it within {LIVE_S:.0f} s"


def _scan(servers: Servers, patience: Patience, pattern: str, report: Report = lambda done: None) -> Iterator[bytes]:
    seen = 0
    for client in servers.primaries():
        cursor = None
        while cursor != 0:
            ask = partial(client.scan, cursor or 0, pattern, KEYS_PER_TRIP)
            cursor, keys = cast(tuple[int, list[bytes]], servers.patiently(ask, patience))
            seen += len(keys)
            report(seen)
            yield from keys


def _delete_queue(queue: Queue) -> None:
    for registry in _REGISTRIES:
        jobs_of_kind = registry(queue=queue)
        jobs = jobs_of_kind.get_job_ids(cleanup=False)
        queue.connection.unlink(jobs_of_kind.key, *(queue.job_class.key_for(job) for job in jobs))
    taken = queue.intermediate_queue.get_job_ids()  # jobs of workers that died before starting them
    seen = queue.connection.scan_iter(f"{queue.key}:*", KEYS_PER_TRIP)  # when RQ first found each such job
    queue.connection.unlink(queue.intermediate_queue_key, *map(queue.job_class.key_for, taken), *seen)
    queue.delete(delete_jobs=True)
