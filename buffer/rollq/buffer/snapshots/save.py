"""Saves a run's buffer to a folder while all roles keep working.

It saves the state of each task at one instant: its index. Payloads are read later, in chunks. Until then the buffer
keeps them (`hold_for_saving`), and since a payload never changes once written, the later read returns what the index
saw. Groups without a result may get one before that; they are saved as pending, so that counters and groups agree.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.calls.core import BufferCore, pairs
from rollq.buffer.common.portions import portions
from rollq.buffer.errors import SnapshotError
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.snapshots.folder import Part, SavedGroup, SavedTask, Snapshot, Writer, writing
from rollq.buffer.store.keys import SCHEMA_VERSION, task_keys
from rollq.buffer.values.rollouts import WHOLE, Status

HOLD_MS = 30_000
"""How long the buffer waits for a saver after its last call. A saver calls after every trip."""
GROUPS_PER_TRIP = 32
PROMPTS_PER_TRIP = 1000
CHUNK_GROUPS = 1000
CHUNK_BYTES = 64 << 20
TRIES = 5

UNFINISHED = (Status.RUNNING, Status.PENDING, Status.ABORTED, Status.EXPIRED)
"""Statuses in which a worker may change a group's samples, or from which it may lease the group."""
POOLS = (Status.ABORTED, Status.EXPIRED)
"""The unfinished statuses that are saved as they are."""
AUDITED = (Status.FILTERED, Status.FAILED)
"""Statuses that the oldest groups leave when there are too many."""
IN_MANIFESTS = (Status.CLAIMED, Status.ARCHIVED)
_OF_A_LEASE = frozenset({
    "nonce", "worker", "alone", "confirmed", "leased_ms", "reserved_by", "reserved_until_ms",
    "offered", "offer_calls", "loans", "loan_parts",
})  # fmt: skip

Report = Callable[[int, int], None]
"""Called with the number of groups that are saved, and of all."""


_Member = tuple[Status, int, str]
"""Status, group id and score."""


class _Moved(SnapshotError):
    """A group that the index lists has left the buffer since."""


@dataclass(slots=True)
class _Index:
    """A task at one instant."""

    clock: dict[str, str]
    parts: dict[str, Part]
    scores: Mapping[Status, Sequence[tuple[int, str]]]

    @property
    def progress(self) -> dict[str, str]:
        progress = self.parts["progress"]
        assert isinstance(progress, dict)
        return progress

    @property
    def batch_of(self) -> dict[str, str]:
        """Group -> handle of the open batch that it belongs to."""
        handles = {
            name[len("batch:") : -len(":groups")]: part for name, part in self.parts.items() if name.endswith(":groups")
        }
        return {group_id: handle for handle, ids in handles.items() for group_id in ids}

    def members(self) -> list[_Member]:
        """Status, group and score. First those that may change soonest."""
        order = sorted(self.scores, key=lambda status: status not in UNFINISHED)
        return [(status, group_id, score) for status in order for group_id, score in self.scores[status]]


class Saving(BufferCore):
    """Calls that save the buffer."""

    def save(self, directory: Path, *, replace: bool = False, report: Report | None = None) -> Snapshot:
        """Save the whole run to the folder `directory`, which appears complete or not at all. No role has to wait.

        `replace`: a snapshot in `directory` is replaced once the new one is complete. Raises `ConfigError` for a folder
        that must not be overwritten, and without the `payloads.url` of the run; `SnapshotError` if the folder cannot be
        written, or if trainers keep taking over the run; and `StoreLost`.
        """
        self._find_server_folder()
        self._check_reach()
        for _ in range(TRIES - 1):
            try:
                return self._save(directory, replace, report)
            except _Moved:
                continue
        return self._save(directory, replace, report)

    def _save(self, directory: Path, replace: bool, report: Report | None) -> Snapshot:
        with writing(directory, replace=replace) as writer:
            tasks = self.tasks()
            hold = partial(self._hold, tasks, secrets.token_hex(8))
            try:
                hold(HOLD_MS)
                indexes = {task: self._index(task) for task in tasks}
                run = self._save_run(indexes)
                saved = {task: self._save_task(writer, task, indexes, hold, report) for task in tasks}
                for task, index in indexes.items():
                    if str(self.clock(task).epoch) != index.clock["epoch"]:
                        raise _Moved(f"a trainer took run {self.run!r} over while it was saved: save it again")
            finally:
                hold(0)
            return writer.finish(**run, tasks=saved)

    def _hold(self, tasks: Iterable[str], save_id: str, hold_ms: int) -> bool:
        """Whether everything has been held since the last call."""
        hold = (self.incarnation, save_id, hold_ms)
        return all(self.call_all([("hold_for_saving", task_keys(self.run, task).clock, *hold) for task in tasks]))

    def _index(self, task: str) -> _Index:
        clock, parts, *scores = self.call_task("save_index", task, *(status.value for status in Status))
        return _Index(
            clock=_texts(clock),
            parts={
                name.decode(): _texts(content) if kind == b"hash" else [_text(item) for item in content]
                for name, kind, content in parts
            },
            scores={
                status: [(int(group_id), score.decode()) for group_id, score in pairs(members)]
                for status, members in zip(Status, scores, strict=True)
            },
        )

    def _save_run(self, indexes: Mapping[str, _Index]) -> dict[str, Any]:
        """The fields of the run. Read after the tasks, since a batch has its plan before its manifest."""
        info, versions, (epoch, undone) = self.send_all(
            [("HMGET", self.keys.info, "ancestors", "model", "tokenizer"), ("HGETALL", self.keys.versions),
             ("HMGET", self.keys.trainer, "epoch", "undone")]
        )  # fmt: skip
        clocks = [index.clock for index in indexes.values()]
        first = min((int(clock["first_manifest"]) for clock in clocks), default=0)
        last = max((int(clock["claimed_step"]) for clock in clocks), default=0)
        committed = min((int(clock["committed"]) for clock in clocks if clock["kind"] == "train"), default=0)
        steps = range(first + 1, last + 1)
        plans = self.send_all([("HGET", self.keys.plan(step), "sizes") for step in steps])
        steps_kept, evaluations = self.send_all(
            [("ZRANGE", key, 0, -1, "WITHSCORES") for key in (self.keys.curves, self.keys.evaluations)]
        )
        return {
            "functions": SCHEMA_VERSION,
            "run": self.run,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": _text(info[1]),
            "tokenizer": _text(info[2]),
            "epoch": int(epoch or 0),
            "undone": _text(undone or b""),
            "ancestors": {**orjson.loads(info[0] or b"{}"), self.incarnation: (committed, int(epoch or 0))},
            "versions": _texts(versions),
            "curves": {"curves": _texts(steps_kept), "evaluations": _texts(evaluations)},
            # ranks that saw a batch delivered are gone after a restore: it is delivered again
            "plans": {str(step): {"sizes": _text(sizes)} for step, sizes in zip(steps, plans, strict=True) if sizes},
        }

    def _save_task(
        self,
        writer: Writer,
        task: str,
        indexes: Mapping[str, _Index],
        hold: Callable[[int], bool],
        report: Report | None,
    ) -> SavedTask:
        index = indexes[task]
        done = sum(_size(other) for name, other in indexes.items() if name < task)
        total = sum(map(_size, indexes.values()))
        statuses = dict.fromkeys((status.value for status in Status), 0)
        chunk: list[SavedGroup] = []
        for trip in _trips(index.members()):
            for groups in self._read_groups(task, index, trip):
                for group in groups:
                    statuses[group.status] += 1
                chunk += groups
                if _is_full(chunk):
                    writer.add(task, chunk)
                    chunk = []
                if not hold(HOLD_MS):
                    raise _Moved(f"saving run {self.run!r} paused for too long, and groups have left: save it again")
            done += len(trip)
            if report:
                report(done, total)
        if chunk:
            writer.add(task, chunk)
        return SavedTask(clock=index.clock, parts={**index.parts, **self._prompts(task)}, statuses=statuses)

    def _prompts(self, task: str) -> dict[str, Part]:
        """Statistics of prompts. There may be many; as averages, they need not be of the instant of the index."""
        key, texts, cursor = task_keys(self.run, task).prompts, dict[str, str](), 0
        while True:
            cursor, page = self.send("HSCAN", key, cursor, "COUNT", PROMPTS_PER_TRIP)
            texts |= _texts(page)
            if cursor == 0:
                return {"prompts": texts} if texts else {}

    def _read_groups(self, task: str, index: _Index, members: Sequence[_Member]) -> Iterator[Sequence[SavedGroup]]:
        """The groups, in portions that are read in a moment: external payloads may be large and slow to read."""
        clock_key = task_keys(self.run, task).clock
        replies = self.call_all([("save_group", clock_key, self.incarnation, group_id) for _, group_id, _ in members])
        batch_of = index.batch_of
        groups: list[SavedGroup] = []
        for (status, group_id, score), (stored, frames, payload) in zip(members, replies, strict=True):
            batch = batch_of.get(str(group_id))
            if fields := _texts(stored):
                groups.append(SavedGroup(group_id, status.value, score, fields, _frames(frames, payload)))
            elif status in IN_MANIFESTS or (batch and status not in AUDITED):
                raise _Moved(f"a batch of task {task!r} was given up while it was saved: save it again")
            else:
                left = f"dropped_{status if status in AUDITED else 'saving'}"
                index.progress[left] = str(int(index.progress.get(left, 0)) + 1)
        for portion in portions(groups, partial(_outside_bytes, task), CHUNK_BYTES):
            named = {group.group_id: group.fields["payload"] for group in portion if _is_away(task, group)}
            away = self.read_payloads(task, named)
            yield [
                as_indexed(
                    replace(group, frames={**group.frames, **_frames((), away.get(group.group_id, b""))}),
                    batch_of.get(str(group.group_id)),
                    int(index.progress["admitted"]),
                )
                for group in portion
            ]


def as_indexed(group: SavedGroup, batch: str | None, admitted: int) -> SavedGroup:
    """The group as it was at the instant of the index, by which it had `group.status` and belonged to `batch`.

    The group was read later than the index, and may have moved since. `admitted`: groups that the task had by then.
    Raises `SnapshotError` for a result that was taken apart since.
    """
    status, now = Status(group.status), Status(group.fields["status"])
    if status not in UNFINISHED and now in UNFINISHED:
        raise _Moved(f"group {group.group_id} was sent back while it was saved: save it again")
    fields = {name: value for name, value in group.fields.items() if name not in _OF_A_LEASE}
    frames = group.frames
    if status in UNFINISHED and not (status is now and status in POOLS):
        status = Status.PENDING
        frames = _restart(fields, now, frames)
    if int(fields.get("clone", 0)) > admitted:  # it was trained since
        del fields["clone"]
    if batch:  # which may have ended since
        fields["batch"] = batch
        fields.pop("shaped", None)
    return SavedGroup(group.group_id, status.value, group.score, {**fields, "status": status.value}, frames)


def _restart(fields: dict[str, str], now: Status, frames: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Change the `fields` of a group that is `now` elsewhere so that it can be pending; returns the frames it keeps."""
    fields.pop("leased", None)
    if now is Status.RUNNING:  # nobody will end this try
        fields["tries"] = str(int(fields["tries"]) - 1)
    elif now is not Status.PENDING:  # the try has ended
        fields["tries"] = "0"
    if now in UNFINISHED:
        return frames
    fields["letters"] = "p" * len(fields["letters"])
    fields.pop("payload", None)
    fields.pop("payload_bytes", None)
    fields.pop("rows", None)
    return {}


def _trips(members: Sequence[_Member]) -> Iterator[Sequence[_Member]]:
    return (members[start : start + GROUPS_PER_TRIP] for start in range(0, len(members), GROUPS_PER_TRIP))


def _outside_bytes(task: str, group: SavedGroup) -> int:
    """The bytes of an external payload; 0 for any other."""
    return int(group.fields["payload_bytes"]) if _is_away(task, group) else 0


def _is_away(task: str, group: SavedGroup) -> bool:
    return PayloadName.parse(task, group.fields.get("payload", "")) is not None


def _is_full(chunk: Sequence[SavedGroup]) -> bool:
    """Whether a file of these groups may not take the groups of one more trip."""
    return len(chunk) + GROUPS_PER_TRIP > CHUNK_GROUPS or sum(group.size_bytes for group in chunk) >= CHUNK_BYTES


def _size(index: _Index) -> int:
    return sum(map(len, index.scores.values()))


def _texts(flat: Any) -> dict[str, str]:
    """A hash, however the driver returns it."""
    items = flat.items() if isinstance(flat, dict) else pairs(flat)
    return {_text(name): _text(value) for name, value in items}


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _frames(flat: Any, payload: bytes) -> dict[str, bytes]:
    """The frames of a group by field, wherever the server had them."""
    frames = {field.decode(): frame for field, frame in pairs(flat)}
    return {**frames, WHOLE: payload} if payload else frames
