"""Read-only calls for monitoring and diagnosis."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from rollq.buffer.calls.core import BufferCore, number, pairs
from rollq.buffer.calls.evaluations import EvaluationState, evaluation_state
from rollq.buffer.calls.replies.prompts import ExcludedRows, Unusable
from rollq.buffer.calls.replies.tasks import ArchiveState, Counts, LastError
from rollq.buffer.calls.trainer_process import process_of
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.rules.revisions import Revision
from rollq.buffer.store.keys import TaskKeys, task_keys
from rollq.buffer.values.history import HistoryRow, Overview, SeenProducer
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.step_rows import StepRow, StepRows
from rollq.buffer.values.trainer_state import TrainerState

_unreadable = LogOnce(logging.getLogger(__name__))

SILENT_WORKER_S = 30.0
GROUPS_SAMPLED = 32
LAST_EVALUATIONS = 5
"""How many ended evaluations are searched for the last one with a result."""


class Inspection(BufferCore):
    """Read-only calls for monitors."""

    def counts(self, task: str) -> Counts:
        """A task's counts and clock, in one consistent read. Raises `StoreLost`."""
        server_ms, ready, outcomes, worth_training, clock, progress, last_error, *statuses = self.call_task(
            "counts", task
        )
        return Counts(
            task=task,
            clock=self._decode_clock(task, dict(pairs(clock))),
            statuses={Status(name.decode()): count for name, count in pairs(statuses)},
            ready=ready,
            outcomes=outcomes,
            kept=worth_training,
            progress={name.decode(): number(value) for name, value in pairs(progress)},
            server_ms=server_ms,
            last_error=_decode_error(server_ms, *last_error),
        )

    def overview(self, task: str, rows: int = 8) -> Overview:
        """Return the facts that monitors show beside a task's counts, with the newest `rows` of its history.

        The cost does not grow with the number of groups. Raises `StoreLost`.
        """
        now_ms, reaped_ms, history, by_staleness, *since, producers = self.call_task("overview", task, rows)
        silent_s, pending_s, running_s, ready_s = (
            max(0.0, (now_ms - at_ms) / 1000) if at_ms else None for at_ms in (reaped_ms, *since)
        )
        return Overview(
            task=task,
            silent_s=silent_s,
            rows=tuple(map(HistoryRow.decode, history)),
            by_staleness=dict(enumerate(by_staleness)),
            pending_age_s=pending_s,
            running_age_s=running_s,
            ready_age_s=ready_s,
            producers=tuple(sorted(_decode_producers(producers, now_ms), key=lambda seen: seen.silent_s)),
        )

    def unusable_rows(self, task: str) -> dict[str, Unusable]:
        """Why rows of a task's prompts are unusable, most frequent reason first."""
        by_reason = self.send("HGETALL", task_keys(self.run, task).unusable)
        reasons = {}
        for reason, value in by_reason.items():
            count, _, first = value.decode(errors="replace").partition(" ")
            reasons[reason.decode(errors="replace")] = Unusable(whole_number(count) or 0, first)
        return dict(sorted(reasons.items(), key=lambda item: -item[1].rows))

    def excluded_rows(self, task: str) -> ExcludedRows:
        """The rows of a task's prompts that an operator excluded."""
        keys = task_keys(self.run, task)
        found, digest = self.send_all([("HGETALL", keys.excluded), ("HGET", keys.prompt_file, "digest")])
        numbers = ((whole_number(row.decode(errors="replace")), of) for row, of in pairs(found))
        rows = [(row, of == digest) for row, of in numbers if row is not None]
        return ExcludedRows(frozenset(row for row, counts in rows if counts), sum(not counts for _, counts in rows))

    def archive_state(self, task: str) -> ArchiveState:
        """The state of a task's archive."""
        names = ("groups", "written_ms", "trouble", "until_ms")
        groups, written_ms, trouble, until_ms = self.send("HMGET", task_keys(self.run, task).archive, *names)
        now_ms = self.server_ms()
        is_alive = int(until_ms or 0) > now_ms
        return ArchiveState(
            groups=int(groups or 0),
            age_s=None if written_ms is None else max(0.0, (now_ms - int(written_ms)) / 1000),
            trouble=trouble.decode(errors="replace") if trouble and is_alive else "",
            is_alive=is_alive,
        )

    def evaluation(self, task: str) -> EvaluationState | None:
        """A task's running evaluation, or else its last evaluation; None before the first evaluation."""
        keys = task_keys(self.run, task)
        over = self.send("LRANGE", keys.prefix + "batches_over", -LAST_EVALUATIONS, -1)
        is_open = int(self.send("HGET", keys.clock, "open_evaluations") or 0) > 0
        handles = [*over, *(self.send("HVALS", keys.batches) if is_open else [])]
        names = ("state", "type", "version", "size", "gathered", "failed", "result")
        batches = self.send_all([("HMGET", keys.batch(handle.decode()), *names) for handle in handles])
        return evaluation_state([dict(zip(names, values, strict=True)) for values in batches], len(over))

    def fullness(self) -> Fullness:
        """How full the buffer is, measured by its servers' memory or `max_buffer_bytes`, whichever is closer to its
        limit."""
        memory, limit = self.memory(), self.payloads.max_buffer_bytes
        if limit is None:
            return memory
        counts = [self.counts(task) for task in self.tasks()]
        largest = max((each.mean_bytes for each in counts), default=0.0)
        expected = sum(each.expected_bytes for each in counts)
        groups = Fullness.of_groups(expected, largest, limit, "payloads.max_buffer_bytes")
        return max(memory, groups, key=lambda fullness: fullness.share)._replace(room_groups=groups.room_groups)

    def _sampled_bytes(self, keys: TaskKeys, statuses: Sequence[Status]) -> list[list[int]]:
        """For each status, the sizes in bytes of some of its groups."""
        ids = self.send_all([("ZRANDMEMBER", keys.status(status), GROUPS_SAMPLED) for status in statuses])
        sizes = iter(self.send_all([("HGET", keys.group(int(group_id)), "bytes") for some in ids for group_id in some]))
        return [[int(next(sizes) or 0) for _ in some] for some in ids]

    def bytes_by_status(self, counts: Counts) -> dict[Status, int]:
        """Bytes of a task's frames by group status: the known sum, divided in the proportions of sampled groups."""
        keys = task_keys(self.run, counts.task)
        statuses = [status for status, groups in counts.statuses.items() if groups]
        sampled = self._sampled_bytes(keys, statuses)
        shares = {
            status: counts.statuses[status] * sum(of_status) / max(1, len(of_status))
            for status, of_status in zip(statuses, sampled, strict=True)
        }
        total, sum_bytes = sum(shares.values()), counts.progress.get("bytes", 0)
        return {status: round(sum_bytes * share / total) for status, share in shares.items() if share}

    def inspect(self, task: str, group_id: int) -> dict[str, str]:
        """One group's stored fields, without its payload; empty for a group that is not in the buffer."""
        flat = self.call_task("inspect", task, group_id)
        return {name.decode(): value.decode() for name, value in pairs(flat)}

    def workers(self, within_s: float = SILENT_WORKER_S) -> dict[str, dict[str, Any]]:
        """Return the last report of every worker that reported within `within_s` seconds, with the report's `age_s`.

        Leaves out unreadable reports: someone else wrote them.
        """
        now_ms = self.server_ms()
        reports: dict[str, dict[str, Any]] = {}
        for name, value in sorted(self.send("HGETALL", self.keys.workers).items()):
            try:
                age_s, report = _decode_report(value, now_ms)
            except (ValueError, TypeError) as error:
                _unreadable.warning(name, "left out a report of worker %.60r that cannot be read: %s", name, error)
                continue
            if abs(age_s) <= within_s:  # the server's clock may have been set back
                reports[name.decode(errors="replace")] = report
        return reports

    def rule_revisions(self, task: str) -> list[Revision]:
        """The last 100 revisions of the task's rules, oldest first."""
        return _revisions(self._rule_records(task), self.rules(task).batch_groups)

    def _rule_records(self, task: str) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.send("HGETALL", task_keys(self.run, task).rules)
        return found

    def curves(self) -> StepRows:
        """The numbers of train steps and evaluations, without unreadable rows."""
        steps, evaluations = self.send_all(
            [("ZRANGE", key, 0, -1, "WITHSCORES") for key in (self.keys.curves, self.keys.evaluations)]
        )
        return StepRows(tuple(_decode_rows(steps)), tuple(_decode_rows(evaluations)))

    def trainer(self) -> dict[str, Any] | None:
        """The trainer's last report, with the report's `age_s`; None before the first report."""
        report = self.send("HGET", self.keys.trainer, "report")
        return None if report is None else _decode_report(report, self.server_ms())[1]

    def trainer_state(self) -> TrainerState | None:
        """The state of the last trainer that took the run; None before the first trainer."""
        names = ("epoch", "trainer_id", "deadline_ms", "lease_ms", "doing", "report", "process", "launch_id")
        fields = dict(zip(names, self.send("HMGET", self.keys.trainer, *names), strict=True))
        now_ms, report = self.server_ms(), fields.pop("report")
        place = Place.read(process_of(fields.pop("process"), (fields.pop("launch_id") or b"").decode()))
        state = TrainerState.decode(fields, now_ms, _decode_report(report, now_ms)[1] if report else None)
        return state and replace(state, place=place)


def _decode_error(now_ms: int, text: bytes | None, at_ms: bytes | None) -> LastError | None:
    if text is None or at_ms is None:
        return None
    return LastError(text.decode(errors="ignore"), max(0.0, (now_ms - int(at_ms)) / 1000))


def _decode_producers(flat: list[bytes], now_ms: int) -> Iterator[SeenProducer]:
    """A task's producers, without entries that someone else wrote."""
    for words, at_ms in pairs(flat):
        with suppress(ValueError, TypeError, AttributeError, OverflowError):
            if place := Place.read(orjson.loads(words)):
                yield SeenProducer(place, max(0.0, (now_ms - int(at_ms)) / 1000))


def _decode_report(raw: bytes, now_ms: int) -> tuple[float, dict[str, Any]]:
    """A report's age in seconds, and the report with its `age_s`, which is never negative."""
    at_ms, _, report = raw.partition(b" ")
    age_s = (now_ms - int(at_ms)) / 1000
    return age_s, {**orjson.loads(report), "age_s": max(age_s, 0.0)}


def _decode_rows(members: Any) -> Iterator[StepRow]:
    for member, step in pairs(members):
        try:
            yield StepRow.decode(member, float(step))
        except (ValueError, TypeError, OverflowError) as error:
            _unreadable.warning("curves", "left out numbers of step %s that cannot be read: %s", step, error)


def _revisions(records: Mapping[bytes, bytes], first_groups: int) -> list[Revision]:
    found = []
    for revision in sorted(int(name) for name in records if name.isdigit()):
        step, time_ms, record = records[b"%d" % revision].split(b" ", 2)
        fields = orjson.loads(record)
        changes = {name: (before, after) for name, (before, after) in fields["changes"].items()}
        batch = fields.get("batch", {})
        found.append(Revision(revision, int(step), int(time_ms) / 1000, fields["by"], changes, batch, first_groups))
    return found
