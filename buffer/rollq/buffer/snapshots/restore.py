"""Restores a saved buffer into a run that does not exist yet.

Everything is checked before the first write. Then the run is reserved for this snapshot, and the groups, each task's
clock, and finally the run itself are written; until then, every role is refused. All steps are safe to repeat, so
another restore completes a restore that died. No version is live afterwards: nothing is leased or admitted until a
trainer starts, which finds the same state as after a crash at the snapshot's instant.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.common.mappings import without
from rollq.buffer.common.portions import portions, slices
from rollq.buffer.errors import RunMismatch, SnapshotError
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.rules.codec import decode_rules, encode_rules
from rollq.buffer.rules.revisions import differences
from rollq.buffer.rules.settings import FIXED_RULES, TaskRules
from rollq.buffer.snapshots.folder import Part, SavedGroup, Snapshot, check, read_groups, read_index
from rollq.buffer.snapshots.save import Report
from rollq.buffer.store.keys import SCHEMA_VERSION, task_keys
from rollq.buffer.store.redis_functions import Beside
from rollq.buffer.values.rollouts import NO_VERSION, WHOLE
from rollq.buffer.wire.group_fields import frame_bytes, is_large

BYTES_PER_CALL = 1 << 20
GROUPS_PER_CALL = 200
ITEMS_PER_WRITE = 1000
_OF_FRAMES = frozenset({"payload", "payload_bytes", "bytes"})
"""A group's fields that depend on where its frames are."""


class Restoring(BufferCore):
    """Calls that restore the buffer."""

    def restore(
        self,
        directory: Path,
        *,
        rules: Mapping[str, TaskRules] | None = None,
        report: Report = lambda groups, of_all: None,
    ) -> Snapshot:
        """Restore the snapshot in `directory` as this run, which must not exist.

        The saved run may have had a different name. `rules` are the tasks' rules from now on; tasks that are not in the
        snapshot start from scratch. Raises `SnapshotError` naming the damaged file, and `RunMismatch` if the run exists
        or naming a fixed rule that differs. In all these cases, nothing has been written.
        """
        snapshot, digest = read_index(directory)
        if snapshot.functions != SCHEMA_VERSION:
            raise SnapshotError(
                f"{directory} was saved from a run with schema {snapshot.functions}, but this rollq restores schema "
                f"{SCHEMA_VERSION}: use the rollq version that saved it"
            )
        _check_rules(snapshot, rules or {})
        check(directory, snapshot)
        reply = self.call("restore_run", self.keys.info, secrets.token_hex(16), digest, self.payloads.place)
        incarnation = self._checked_incarnation(reply)
        self._incarnation = incarnation
        if self.payloads.outside:
            self.payloads.outside.mark(self.payloads.folder(incarnation))
        done = 0
        for task in snapshot.tasks:
            self._discard_leftover(task)
            total_bytes = 0
            groups = read_groups(directory, snapshot, task)
            for call in portions(groups, lambda group: group.size_bytes, BYTES_PER_CALL, most_items=GROUPS_PER_CALL):
                total_bytes += self._restore_groups(incarnation, snapshot, task, call)
                done += len(call)
                report(done, snapshot.groups)
            self._restore_task(incarnation, snapshot, task, total_bytes)
        self._finish_restore(incarnation, snapshot, digest)
        return snapshot

    def _restore_groups(self, incarnation: str, snapshot: Snapshot, task: str, groups: list[SavedGroup]) -> int:
        """Write the groups; return the total bytes of their frames."""
        keys = task_keys(self.run, task)
        args: list[Any] = []
        beside: dict[str, bytes] = {}
        away: dict[PayloadName, bytes] = {}
        total_bytes = 0
        for group in groups:
            fields, frames = without(group.fields, _OF_FRAMES), dict(group.frames)
            if size_bytes := frame_bytes(frames, group_size=len(fields["letters"])):
                fields["bytes"] = str(size_bytes)
                total_bytes += size_bytes
            if is_large(len(frames.get(WHOLE, b""))):
                whole, nonce = frames.pop(WHOLE), _nonce(task, group)
                if place := self.payloads.place_for(len(whole)):
                    name = PayloadName(task, place, group.group_id, f"{nonce}-restored")
                    away[name], fields["payload"] = whole, name.encoded
                else:
                    beside[keys.payload(group.group_id, nonce)], fields["payload"] = whole, nonce
                fields["payload_bytes"] = str(len(whole))
            args += (group.group_id, group.status, group.score, len(fields), *_flat(fields))
            args += (len(frames), *_flat(frames))
        with self.payloads.writing() as write:
            for name, payload in away.items():
                write(name, payload)
        sorted_by = [snapshot.tasks[task].clock[rule] for rule in ("order", "priority_decay")]
        self.call_all([Beside(("restore_groups", keys.clock, incarnation, *sorted_by, *args), beside)])
        return total_bytes

    def _restore_task(self, incarnation: str, snapshot: Snapshot, task: str, total_bytes: int) -> None:
        saved = snapshot.tasks[task]
        progress = saved.parts.get("progress", {})
        assert isinstance(progress, dict)
        parts = dict(saved.parts)
        if total_bytes or "bytes" in progress:
            parts["progress"] = {**progress, "bytes": str(total_bytes)}
        clock = saved.clock | {
            "incarnation": incarnation, "events": self.keys.events, "nonce": "", "version": str(NO_VERSION),
            "reaped_ms": "0", "hold_until_ms": "0", "saving_until_ms": "0",
        }  # fmt: skip
        key = task_keys(self.run, task).clock
        for write in _writes(parts.items()):
            self.call("restore_task", key, incarnation, 0, *write)
        (write,) = _writes([("clock", clock)])
        self.call("restore_task", key, incarnation, 1, *write)

    def _finish_restore(self, incarnation: str, snapshot: Snapshot, digest: str) -> None:
        run = {
            "incarnation": incarnation, "schema": str(SCHEMA_VERSION), "model": snapshot.model,
            "tokenizer": snapshot.tokenizer, "restored_from": digest,
            "payloads": self.payloads.place,
            "ancestors": orjson.dumps(snapshot.ancestors).decode(),
        }  # fmt: skip
        # the first trainer may resume at this step: a task that joins before then must not start at a later step
        first_step = snapshot.resume_steps[0]
        trainer = {"epoch": str(snapshot.epoch), "nonce": "", "from_step": str(first_step), "undone": snapshot.undone}
        parts: list[tuple[str, Part]] = [("run", run), ("trainer", trainer), ("versions", snapshot.versions)]
        parts += [(f"plan:{step}", plan) for step, plan in snapshot.plans.items()]
        writes = chain(*_writes(parts), *_row_writes(snapshot.curves))
        self.call("finish_restore", self.keys.info, incarnation, digest, *writes, "", *snapshot.tasks)


NO_LEASE = "0" * 16
"""Replaces a lease's nonce in payload names."""


def _nonce(task: str, group: SavedGroup) -> str:
    """The nonce of the lease that made a group's large frame; `NO_LEASE` for an inserted group."""
    named = group.fields.get("payload") or group.fields.get("put_nonce") or NO_LEASE
    away = PayloadName.parse(task, named)
    return away.leaf.partition("-")[0] if away else named


def _check_rules(snapshot: Snapshot, rules: Mapping[str, TaskRules]) -> None:
    for task, asked in rules.items():
        if task in snapshot.tasks:
            saved = decode_rules(snapshot.tasks[task].clock)
            for name, (before, after) in differences(saved, decode_rules(encode_rules(asked))).items():
                if name in FIXED_RULES:
                    raise RunMismatch(
                        f"task {task!r} was saved with {name} = {before}, but the settings have {after}. It cannot "
                        f"change during a run, because {FIXED_RULES[name]}; change it back, or start a new run"
                    )


def _writes(parts: Iterable[tuple[str, Part]]) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of `write_parts` for hashes and lists, in writes small enough for Lua."""
    for name, part in parts:
        items = list(_flat(part)) if isinstance(part, dict) else part
        for start in range(0, len(items), ITEMS_PER_WRITE):
            write = items[start : start + ITEMS_PER_WRITE]
            if isinstance(part, dict):
                yield (name, "HSET", len(write), *write)
            else:
                yield (name, "RPUSH", len(write) + 1, start, *write)


def _row_writes(curves: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[Any, ...]]:
    """Yield arguments of `write_parts` for rows by step, in writes small enough for Lua."""
    for name, rows in curves.items():
        items = [item for row, step in rows.items() for item in (step, row)]
        for write in slices(items, ITEMS_PER_WRITE):
            yield (name, "ZADD", len(write), *write)


def _flat(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    return (item for pair in mapping.items() for item in pair)
