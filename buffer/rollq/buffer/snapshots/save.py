"""Saves a run's buffer to a folder while all roles keep working.

The state of each task is saved at one instant, as the task's index. Payloads are read later, in chunks. Until then the
buffer keeps them (`hold_for_saving`), and since a payload never changes once written, the later read agrees with the
index. Groups without a result may get one before the read; they are saved as pending, so that counters and groups
agree.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.calls.core import pairs
from rollq.buffer.calls.stored_groups import ReadingStored, text, texts, whole
from rollq.buffer.common.mappings import without
from rollq.buffer.common.portions import portions, slices
from rollq.buffer.errors import SnapshotError
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.snapshots.folder import Part, SavedGroup, SavedTask, Snapshot, Writer, writing
from rollq.buffer.store.keys import SCHEMA_VERSION, task_keys
from rollq.buffer.values.rollouts import Status

HOLD_MS = 30_000
"""How long the buffer waits for a saver after its last call. A saver calls after every round trip."""
GROUPS_PER_TRIP = 32
PROMPTS_PER_TRIP = 1000
CHUNK_GROUPS = 1000
CHUNK_BYTES = 64 << 20
TRIES = 5

UNFINISHED = (Status.RUNNING, Status.PENDING, Status.ABORTED, Status.EXPIRED)
"""Statuses in which a worker may change a group's samples or lease the group."""
POOLS = (Status.ABORTED, Status.EXPIRED)
"""The unfinished statuses that are saved unchanged."""
AUDITED = (Status.FILTERED, Status.FAILED)
"""Statuses that the oldest groups leave when there are too many."""
IN_MANIFESTS = (Status.CLAIMED, Status.ARCHIVED)
_OF_A_LEASE = frozenset({
    "nonce", "worker", "alone", "confirmed", "leased_ms", "reserved_by", "reserved_until_ms",
    "offered", "offer_calls", "loans", "loan_parts",
})  # fmt: skip

Report = Callable[[int, int], None]
"""Called with the number of saved groups and the number of all groups."""


_Member = tuple[Status, int, str]
"""Status, group id and score."""


class _Moved(SnapshotError):
    """A group in the index has left the buffer since then."""


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
        """Group -> handle of the group's open batch."""
        handles = {
            name[len("batch:") : -len(":groups")]: part for name, part in self.parts.items() if name.endswith(":groups")
        }
        return {group_id: handle for handle, ids in handles.items() for group_id in ids}

    def can_lose(self, status: Status, group_id: int) -> bool:
        """Whether the snapshot may lack a group, since no batch has it."""
        return status in AUDITED or (status not in IN_MANIFESTS and str(group_id) not in self.batch_of)

    def members(self) -> list[_Member]:
        """Status, id and score of each group, beginning with the groups that may change soonest."""
        order = sorted(self.scores, key=lambda status: status not in UNFINISHED)
        return [(status, group_id, score) for status in order for group_id, score in self.scores[status]]


class Saving(ReadingStored):
    """Calls that save the buffer."""

    def save(self, directory: Path, *, replace: bool = False, report: Report = lambda groups, of_all: None) -> Snapshot:
        """Save the whole run to the folder `directory`, which appears complete or not at all. No role has to wait.

        With `replace`, a snapshot in `directory` is replaced once the new snapshot is complete. Raises `ConfigError`
        for a folder that must not be overwritten, and without the run's `payloads.url`; `SnapshotError` if the folder
        cannot be written, or if trainers keep taking over the run; and `StoreLost`.
        """
        self._find_server_folder()
        self._check_reach()
        for _ in range(TRIES - 1):
            try:
                return self._save(directory, replace, report)
            except _Moved:
                continue
        return self._save(directory, replace, report)

    def _save(self, directory: Path, replace: bool, report: Report) -> Snapshot:
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
        """Hold everything for `hold_ms`; returns whether everything has been held since the last call."""
        hold = (self.incarnation, save_id, hold_ms)
        return all(self.call_all([("hold_for_saving", task_keys(self.run, task).clock, *hold) for task in tasks]))

    def _index(self, task: str) -> _Index:
        clock, parts, *scores = self.call_task("save_index", task, *(status.value for status in Status))
        return _Index(
            clock=texts(clock),
            parts={
                name.decode(): texts(content) if kind == b"hash" else [text(item) for item in content]
                for name, kind, content in parts
            },
            scores={
                status: [(int(group_id), score.decode()) for group_id, score in pairs(members)]
                for status, members in zip(Status, scores, strict=True)
            },
        )

    def _save_run(self, indexes: Mapping[str, _Index]) -> dict[str, Any]:
        """The run's fields. Read after the tasks, since a batch gets its plan before its manifest."""
        info, versions, (epoch, undone), steps, evaluations = self.send_all(
            [("HMGET", self.keys.info, "ancestors", "model", "tokenizer"), ("HGETALL", self.keys.versions),
             ("HMGET", self.keys.trainer, "epoch", "undone"), ("ZRANGE", self.keys.curves, 0, -1, "WITHSCORES"),
             ("ZRANGE", self.keys.evaluations, 0, -1, "WITHSCORES")]
        )  # fmt: skip
        clocks = [index.clock for index in indexes.values()]
        committed = min((int(clock["committed"]) for clock in clocks if clock["kind"] == "train"), default=0)
        epoch = int(epoch or 0)
        return {
            "functions": SCHEMA_VERSION,
            "run": self.run,
            "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": text(info[1]),
            "tokenizer": text(info[2]),
            "epoch": epoch,
            "undone": text(undone or b""),
            "ancestors": {**orjson.loads(info[0] or b"{}"), self.incarnation: (committed, epoch)},
            "versions": texts(versions),
            "curves": {"curves": texts(steps), "evaluations": texts(evaluations)},
            "plans": self._plans(clocks),
        }

    def _plans(self, clocks: Sequence[Mapping[str, str]]) -> dict[str, dict[str, str]]:
        """The kept batches' plans, by step. Ranks that saw a batch delivered are gone after a restore: the batch is
        delivered again."""
        first = min((int(clock["first_manifest"]) for clock in clocks), default=0)
        last = max((int(clock["claimed_step"]) for clock in clocks), default=0)
        steps = range(first + 1, last + 1)
        plans = self.send_all([("HGET", self.keys.plan(step), "sizes") for step in steps])
        return {str(step): {"sizes": text(sizes)} for step, sizes in zip(steps, plans, strict=True) if sizes}

    def _save_task(
        self, writer: Writer, task: str, indexes: Mapping[str, _Index], hold: Callable[[int], bool], report: Report
    ) -> SavedTask:
        index, statuses = indexes[task], Counter({status.value: 0 for status in Status})
        groups = self._held_groups(task, indexes, hold, report)
        for chunk in portions(groups, attrgetter("size_bytes"), CHUNK_BYTES, most_items=CHUNK_GROUPS):
            statuses.update(group.status for group in chunk)
            writer.add(task, chunk)
        return SavedTask(clock=index.clock, parts={**index.parts, **self._prompts(task)}, statuses=statuses)

    def _held_groups(
        self, task: str, indexes: Mapping[str, _Index], hold: Callable[[int], bool], report: Report
    ) -> Iterator[SavedGroup]:
        """Yield a task's groups, while the buffer holds the groups that are still to be read."""
        done = sum(_size(other) for name, other in indexes.items() if name < task)
        total = sum(map(_size, indexes.values()))
        for trip in slices(indexes[task].members(), GROUPS_PER_TRIP):
            for groups in self._read_groups(task, indexes[task], trip):
                yield from groups
                if not hold(HOLD_MS):
                    raise _Moved(f"saving run {self.run!r} paused for too long, and groups have left: save it again")
            done += len(trip)
            report(done, total)

    def _prompts(self, task: str) -> dict[str, Part]:
        """Prompt statistics. There may be many; as averages, they need not match the index's instant."""
        key, statistics, cursor = task_keys(self.run, task).prompts, dict[str, str](), 0
        while True:
            cursor, page = self.send("HSCAN", key, cursor, "COUNT", PROMPTS_PER_TRIP)
            statistics |= texts(page)
            if cursor == 0:
                return {"prompts": statistics} if statistics else {}

    def _read_groups(self, task: str, index: _Index, members: Sequence[_Member]) -> Iterator[Sequence[SavedGroup]]:
        """Yield the groups, in quickly read portions: external payloads may be large and slow to read."""
        batch_of, admitted = index.batch_of, int(index.progress["admitted"])
        groups = list(self._still_there(task, index, members))
        for portion in portions(groups, partial(_outside_bytes, task), CHUNK_BYTES):
            named = {group.group_id: group.fields["payload"] for group in portion if _is_away(task, group)}
            away = self.read_payloads(task, named)
            read = [replace(group, frames={**group.frames, **whole(away.get(group.group_id))}) for group in portion]
            yield [as_indexed(group, batch_of.get(str(group.group_id)), admitted) for group in read]

    def _still_there(self, task: str, index: _Index, members: Sequence[_Member]) -> Iterator[SavedGroup]:
        """Yield the groups as they are now. Groups that have left are counted as dropped."""
        stored = self.stored_groups(task, [group_id for _, group_id, _ in members])
        for (status, group_id, score), (_, fields, frames) in zip(members, stored, strict=True):
            if fields:
                yield SavedGroup(group_id, status.value, score, texts(fields), frames)
            elif index.can_lose(status, group_id):
                left = f"dropped_{status if status in AUDITED else 'saving'}"
                index.progress[left] = str(int(index.progress.get(left, 0)) + 1)
            else:
                raise _Moved(f"a batch of task {task!r} was given up while it was saved: save it again")


def as_indexed(group: SavedGroup, batch: str | None, admitted: int) -> SavedGroup:
    """Return the group as it was at the index's instant, when it had `group.status` and belonged to `batch`. The group
    was read after the index, and may have moved since. `admitted` is the number of groups that the task had by the
    index's instant. Raises `SnapshotError` if the group's result was undone in the meantime.
    """
    status, now = Status(group.status), Status(group.fields["status"])
    if status not in UNFINISHED and now in UNFINISHED:
        raise _Moved(f"group {group.group_id} was sent back while it was saved: save it again")
    fields, frames = without(group.fields, _OF_A_LEASE), group.frames
    if status in UNFINISHED and not (status is now and status in POOLS):
        status = Status.PENDING
        frames = _restart(fields, now, frames)
    if int(fields.get("clone", 0)) > admitted:  # it was trained since
        del fields["clone"]
    if batch:  # the batch may have ended since
        fields["batch"] = batch
        fields.pop("shaped", None)
    return SavedGroup(group.group_id, status.value, group.score, {**fields, "status": status.value}, frames)


def _restart(fields: dict[str, str], now: Status, frames: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Change the `fields` of a group with status `now` so that it can be pending; returns the frames that it keeps."""
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


def _outside_bytes(task: str, group: SavedGroup) -> int:
    """The size in bytes of a group's external payload; 0 for any other payload."""
    return int(group.fields["payload_bytes"]) if _is_away(task, group) else 0


def _is_away(task: str, group: SavedGroup) -> bool:
    return PayloadName.parse(task, group.fields.get("payload", "")) is not None


def _size(index: _Index) -> int:
    return sum(map(len, index.scores.values()))
