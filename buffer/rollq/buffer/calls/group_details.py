"""One whole group, in any status, for display: its life so far and its samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rollq.buffer.calls.stored_groups import ReadingStored, texts
from rollq.buffer.common.portions import slices
from rollq.buffer.errors import ConfigError, CorruptFrame, ServerError
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import EMPTY_SAMPLE, WHOLE, Prompt, Sample, SampleStatus, Status
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.group_fields import frames_by_index
from rollq.buffer.wire.parts import decode_parts
from rollq.buffer.wire.prompts import decode_prompt
from rollq.buffer.wire.sample_outcomes import SampleOutcome, decode_outcomes, longest

GROUPS_PER_TRIP = 16
STEPPED = (Status.CLAIMED, Status.ARCHIVED)


class PastLease(NamedTuple):
    """One lease of a group, from its history.

    `end` is one of: running, put, handed_back (the try does not count), error (handed back, and the try counts),
    ran_out (the worker died or was cut off), unconfirmed (the lease never reached the worker), batch_ended, dropped, or
    quarantined (by hand). `parts` counts the salvaged sample parts, and `version` is the version of the worker's
    weights. Times are the server's, in ms since 1970; `until_ms` is None while the lease runs.
    """

    attempt: int
    worker: str
    version: int
    from_ms: int
    until_ms: int | None
    end: str
    parts: int


class TrainStep(NamedTuple):
    """The train step whose batch has a group, and when the batch was claimed and committed (ms since 1970)."""

    step: int
    claimed_ms: int | None
    committed_ms: int | None


@dataclass(frozen=True, slots=True, eq=False)
class FoundGroup:
    """A group as it was at `server_ms`.

    `fields` holds its stored numbers. `samples` has one entry per sample, `EMPTY_SAMPLE` for a missing one; `problem`
    says why existing samples could not be read, else "". `leases` holds the last leases, oldest first. `deadline_ms` is
    the deadline of a running group's lease. `is_archived` is true for a group that has left the buffer and was read
    from the archive.
    """

    task: str
    group_id: int
    status: Status
    fields: Mapping[str, str]
    prompt: Prompt
    samples: tuple[Sample, ...]
    problem: str
    leases: tuple[PastLease, ...]
    batch: TrainStep | None
    deadline_ms: int | None
    server_ms: int
    is_archived: bool = False

    @property
    def outcomes(self) -> tuple[SampleOutcome, ...]:
        """The outcomes of the samples that have started."""
        return decode_outcomes(self.fields.get("samples", ""), self.fields.get("letters", ""))

    @property
    def reward(self) -> float | None:
        """The mean over the samples at the last put; None if no finished sample is left."""
        return reward_of(self.fields)

    @property
    def tokens(self) -> int | None:
        """The longest sample's number of response tokens; None without samples."""
        return longest(self.outcomes)

    @property
    def listed_step(self) -> int | None:
        """The train step that claimed the group, else the step that it was admitted for."""
        if self.batch:
            return self.batch.step
        return _number(self.fields.get("trained_step") or self.fields.get("step"))

    @property
    def at_ms(self) -> int | None:
        """When the group was last put, or else admitted, in ms since 1970."""
        return _number(self.fields.get("put_ms") or self.fields.get("admitted_ms"))

    @property
    def row(self) -> int | None:
        """The row of the group's prompt among its task's prompts."""
        return _number(self.fields.get("row"))

    @property
    def tries(self) -> int | None:
        """The number of attempts since the group was last interrupted or expired."""
        return _number(self.fields.get("tries"))


class Looking(ReadingStored):
    """Calls that read groups with their samples."""

    def look(self, task: str, group_ids: Iterable[int]) -> list[FoundGroup]:
        """Return the groups with these ids that are in the buffer, each read at one instant.

        If samples cannot be read, their group's `problem` says why. Raises `StoreLost`.
        """
        return [group for trip in slices([*group_ids], GROUPS_PER_TRIP) for group in self._look_at(task, trip)]

    def newest(self, task: str, status: Status) -> int | None:
        """The most recently admitted group with this status; None without any."""
        (members,) = self.call_task("find", task, status.value, "-inf", "+inf")
        return max(map(int, members), default=None)

    def groups_of_step(self, task: str, step: int) -> list[int]:
        """The groups in a train step's batch, in order; none if the buffer has no such batch."""
        ids = self.send("HGET", task_keys(self.run, task).manifest(step), "ids") or b""
        return [int(group_id) for group_id in ids.split(b",") if group_id]

    def leaving_of_step(self, task: str, step: int) -> list[int]:
        """The groups that a train step trained or dropped and that still wait for the archive."""
        return [
            int(one)
            for one in self.send("ZRANGE", task_keys(self.run, task).status(Status.LEAVING), step, step, "BYSCORE")
        ]

    def _look_at(self, task: str, ids: Sequence[int]) -> Iterator[FoundGroup]:
        for group_id, stored, frames in self.stored_groups(task, ids):
            fields = texts(stored)
            if "status" not in fields:
                continue
            problem = self._read_away(task, group_id, fields.get("payload", ""), frames)
            samples, unreadable = _decode_samples(frames, fields["letters"])
            status = Status(fields["status"])
            yield FoundGroup(
                task, group_id, status, fields, decode_prompt(fields["prompt"].encode()), samples,
                problem or unreadable, past_leases(fields), self._batch_of(task, group_id, status),
                self._deadline_of(task, group_id, status), self.server_ms(),
            )  # fmt: skip

    def _read_away(self, task: str, group_id: int, name: str, stored: dict[str, bytes]) -> str:
        """Add a group's external payload to its frames. Returns why this failed, or ""."""
        if not name or WHOLE in stored:
            return ""
        if PayloadName.parse(task, name) is None:
            return "its samples are no longer in the store"
        try:
            payload = self.read_payloads(task, {group_id: name}).get(group_id)
        except (ConfigError, ServerError) as error:
            return f"its samples are not on the server and cannot be read: {error}"
        if payload is None:
            return "its samples are no longer in the folder or bucket of payloads"
        stored[WHOLE] = payload
        return ""

    def steps_of(self, task: str, statuses: Mapping[int, Status]) -> dict[int, int]:
        """The train steps of groups with these statuses; groups without a step are left out."""
        keys = task_keys(self.run, task)
        stepped = [group_id for group_id, status in statuses.items() if status in STEPPED]
        scores = self.send_all([("ZSCORE", keys.status(statuses[group_id]), group_id) for group_id in stepped])
        return {group_id: int(score) for group_id, score in zip(stepped, scores, strict=True) if score is not None}

    def _batch_of(self, task: str, group_id: int, status: Status) -> TrainStep | None:
        step = self.steps_of(task, {group_id: status}).get(group_id)
        if step is None:
            return None
        times = self.send("HMGET", task_keys(self.run, task).manifest(step), "claimed_ms", "committed_ms")
        return TrainStep(step, *(None if time is None else int(time) for time in times))

    def _deadline_of(self, task: str, group_id: int, status: Status) -> int | None:
        if status is not Status.RUNNING:
            return None
        deadline = self.send("ZSCORE", task_keys(self.run, task).status(status), group_id)
        return None if deadline is None else int(deadline)


def by_task(
    read: Callable[[str, Sequence[int]], Iterable[FoundGroup]], places: Iterable[tuple[str, int]]
) -> Iterator[FoundGroup]:
    """Yield the groups that `read` finds in each task, in order; consecutive ids in a task are read together."""
    for task, of_task in groupby(places, key=itemgetter(0)):
        yield from read(task, [group_id for _, group_id in of_task])


def reward_of(fields: Mapping[str, str]) -> float | None:
    """A group's reward, from its fields; None if no finished sample is left."""
    return float(fields["reward"]) if fields.get("reward") and SampleStatus.COMPLETED in fields["letters"] else None


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def past_leases(fields: Mapping[str, str]) -> tuple[PastLease, ...]:
    """A group's leases, oldest first, from its fields `history` and `leased`."""
    leases = [
        _lease(attempt, leased, int(until_ms), end, parts)
        for line in filter(None, fields.get("history", "").split("\n"))
        for attempt, until_ms, end, parts, leased in [line.split(" ", 4)]
    ]
    if leased := fields.get("leased"):
        runs = fields["status"] == Status.RUNNING
        until_ms, end, parts = (
            (None, "running", fields.get("parts", "0")) if runs else (int(fields["put_ms"]), "put", "0")
        )
        leases.append(_lease(fields["attempt"], leased, until_ms, end, parts))
    return tuple(leases)


def _lease(attempt: str, leased: str, until_ms: int | None, end: str, parts: str) -> PastLease:
    from_ms, version, worker = leased.split(" ", 2)
    return PastLease(int(attempt), worker, int(version), int(from_ms), until_ms, end, int(parts))


def _decode_whole(stored: Mapping[str, bytes], problems: list[str]) -> dict[int, Sample]:
    try:
        return dict(enumerate(decode_samples(stored[WHOLE])))
    except CorruptFrame as error:
        problems.append(str(error))
        return {}


def _decode_samples(stored: Mapping[str, bytes], letters: str) -> tuple[tuple[Sample, ...], str]:
    """Decode the samples with these `letters`; also returns the problem with unreadable samples, or ""."""
    single, problems = frames_by_index(stored), list[str]()
    samples = [EMPTY_SAMPLE] * len(letters)
    whole = _decode_whole(stored, problems) if WHOLE in stored else {}
    for index in (index for index, letter in enumerate(letters) if letter != SampleStatus.PENDING):
        try:
            sample = decode_parts(index, single, group_size=len(letters))
            samples[index] = sample or whole.get(index, EMPTY_SAMPLE)
        except CorruptFrame as error:
            problems.append(f"sample {index}: {error}")
    return tuple(samples), "; ".join(problems)
