"""The worker's side of the buffer: groups out under a lease, results in."""

import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from redis.exceptions import RedisError

from rollq.buffer.core import BufferCore, pairs
from rollq.buffer.errors import EpochMoved, InvalidGroup, ServerRefused, StaleWorker
from rollq.buffer.replies import Leased, PutOutcome, SalvageOutcome
from rollq.buffer.rollouts import (
    BESIDE,
    EMPTY_SAMPLE,
    WHOLE,
    GroupResult,
    Lease,
    Sample,
    SamplePart,
    SampleStatus,
    Status,
)
from rollq.buffer.samples import Samples
from rollq.buffer.settings import TaskRules
from rollq.buffer.staleness import Floors, brings_labels, counted_version
from rollq.buffer.store.functions import Beside, Call
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_errors import code_of
from rollq.buffer.wire.parts import encode_part, tokens_in_parts
from rollq.buffer.wire.payload import decode_kept, encode_payload, frames_by_index, is_large
from rollq.buffer.wire.prompts import decode_prompt
from rollq.buffer.wire.rows import SampleRows

log = logging.getLogger(__name__)

MAX_GROUP_BYTES = 256 << 20
MAX_CALL_BYTES = 256 << 10
"""Bytes of one call with several groups, payloads included: the server files them while the rest is being encoded."""
NUMBERS_BYTES = 256
"""Approximate size of a group in a call, without its frames."""
_NO_VERSION = "-"
RESULT_ARGS = (
    "id", "attempt", "nonce", "letters", "versions", "oldest", "newest", "filtered", "reward", "rewarded", "new_tokens",
    "tokens", "took_ms", "error_text", "frame_count", "passed", "rewarded_tokens", "rows",
)  # fmt: skip
"""The numbers of one group in a call of `put`, in their order."""


class Leasing(BufferCore):
    """Calls of workers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._floors: dict[str, tuple[int, Floors]] = {}
        self._drained_for: str | None = None

    def lease(
        self,
        tasks: Sequence[str],
        n: int,
        *,
        worker: str,
        version: int,
        epoch: int,
        suspects_held: int = 0,
        idle: bool = True,
    ) -> Leased:
        """Lease up to `n` of the best pending groups over `tasks`, for weights (`epoch`, `version`).

        `worker` names this incarnation of the worker. `suspects_held`: suspects among its leases; `idle`: holds none.
        Raises StaleWorker when its weights would already be too old at the next step, StoreLost.
        """
        leased = self._lease(tasks, n, worker, f"{epoch}:{version}", suspects_held, idle)
        gone = self.renew(leased.leases)  # confirms that they have arrived
        return leased._replace(leases=tuple(lease for lease in leased.leases if lease not in gone)) if gone else leased

    def _lease(self, tasks: Sequence[str], n: int, worker: str, weights: str, suspects_held: int, idle: bool) -> Leased:
        found: list[Lease] = []
        shares = self._shares(tasks, n, weights)
        # The task that a drain was for comes first: after leases of another one, the caller would not be idle for it.
        for task in sorted(shares, key=lambda task: task != self._drained_for):
            nonce, share, first = secrets.token_hex(8), shares[task], int(idle and not found)
            try:
                reply = self.call_task("lease", task, worker, nonce, *weights.split(":"), share, suspects_held, first)
            except StaleWorker:
                if found:  # leases that the caller never receives would look like a death
                    break
                raise
            if reply[0] == 1:
                self._drained_for = task
                return Leased(tuple(found), drain=True)
            payloads = self._read_payloads(task, reply[1:])
            leases = [_decode_lease(task, nonce, *each) for each in zip(reply[1:], payloads, strict=True)]
            found += leases
            suspects_held += sum(lease.suspect for lease in leases)
            if any(lease.alone for lease in leases):
                break
        return Leased(tuple(found), drain=False)

    def _read_payloads(self, task: str, leased: Sequence[Sequence[Any]]) -> list[bytes | None]:
        """The payloads that earlier attempts left of leased groups; None where there is none."""
        keys = task_keys(self.run, task)
        names = {group_id: keys.payload(group_id, last.decode()) for group_id, *_, last in leased if last}
        found = dict(zip(names, self.send_all([("GET", name) for name in names.values()]), strict=True))
        return [found.get(group_id) for group_id, *_ in leased]

    def _shares(self, tasks: Sequence[str], n: int, weights: str) -> dict[str, int]:
        """Which tasks have the `n` best pending groups that weights ("epoch:version") may serve: task -> groups."""
        if len(tasks) == 1:
            return {tasks[0]: n}
        tasks = self._tasks_for(tasks, weights)
        pending = [task_keys(self.run, task).status(Status.PENDING) for task in tasks]
        heads: list[list[bytes]] = self.send_all([("ZRANGE", key, 0, n - 1, "WITHSCORES") for key in pending])
        scores = [(float(score), index) for index, head in enumerate(heads) for score in head[1::2]]
        counted = Counter(index for _, index in sorted(scores)[:n])
        return {task: counted[index] for index, task in enumerate(tasks) if counted[index]}

    def _tasks_for(self, tasks: Sequence[str], weights: str) -> list[str]:
        """The tasks without those evaluations that are of other weights ("epoch:version")."""
        evaluations = [task for task in tasks if self.rules(task).kind == "eval"]
        pins = self.send_all([("HGET", task_keys(self.run, task).clock, "pin") for task in evaluations])
        others = {task for task, pin in zip(evaluations, pins, strict=True) if pin != weights.encode()}
        return [task for task in tasks if task not in others]

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Confirm leases and move their deadline; returns those that are no longer the caller's."""
        by_task = _by_task(leases)
        calls = [
            ("renew", task_keys(self.run, task).clock, self.incarnation, *_fences(mine))
            for task, mine in by_task.items()
        ]
        lost = zip(by_task.values(), self.call_all(calls), strict=True)
        return [lease for mine, ids in lost for lease in mine if lease.group_id in ids]

    def hand_back(self, leases: Sequence[Lease], *, counted: bool = False, error: str | None = None) -> int:
        """Give groups back unfinished. `counted`: the try was spent, `error` says on what; out of tries, they fail.

        Returns how many went back.
        """
        return sum(
            int(self.call_task("hand_back", task, int(counted), error or "", *_fences(mine)))
            for task, mine in _by_task(leases).items()
        )

    def salvage(self, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
        """Keep parts of samples that are still being made; returns an outcome for each.

        If the worker dies, the next lease of the group has samples with these tokens. A part is kept only while its
        lease is the caller's, and after all parts of the group with smaller numbers. One that cannot be encoded is
        refused alone. Harmless to repeat.
        """
        outcomes = dict.fromkeys(range(len(parts)), SalvageOutcome.REFUSED)
        for task in dict.fromkeys(part.lease.task for part in parts):
            indices = [index for index, part in enumerate(parts) if part.lease.task == task]
            (_, floors), rules = self._epoch_floors(task), self.rules(task)
            clock = task_keys(self.run, task).clock
            encoded = {index: args for index in indices if (args := _part_args(parts[index], floors, rules))}
            mine = _calls_of(_GroupArgs(args, {"": args[-1]}) for args in encoded.values())
            replies = self.call_all([("salvage", clock, self.incarnation, *args) for args, _ in mine])
            words = [SalvageOutcome(word.decode()) for reply in replies for word in reply]
            outcomes |= zip(encoded, words, strict=True)
        return [outcomes[index] for index in range(len(parts))]

    def put(self, results: Sequence[GroupResult]) -> list[PutOutcome]:
        """File results, in order. The only way in which generated tokens enter the buffer.

        A result that cannot be trained on (see `check_group`) is filed as failed, with the reason. Harmless to repeat:
        what was filed before answers `DUPLICATE`, also when this call had to try again itself.
        """
        outcomes: dict[int, PutOutcome] = {}
        for task, indices in _indices_by_task(results).items():
            while indices:
                words = self._put(task, [results[index] for index in indices])
                outcomes.update((index, PutOutcome(word.decode())) for index, word in zip(indices, words, strict=False))
                indices = indices[len(words) :]
        return [outcomes[index] for index in range(len(results))]

    def _put(self, task: str, results: Sequence[GroupResult]) -> list[bytes]:
        """File results of one task; returns a word for each, up to the first one that met a new epoch."""
        try:
            return self._put_with(task, results)
        except ServerRefused as error:
            if not (isinstance(error.__cause__, RedisError) and code_of(error.__cause__) == "OOM"):
                raise
        # a full server sets no keys any more, but `put` may still file results there
        return self._put_with(task, results, all_inline=True)

    def _put_with(self, task: str, results: Sequence[GroupResult], *, all_inline: bool = False) -> list[bytes]:
        epoch, floors = self._epoch_floors(task)
        rules, keys = self.rules(task), task_keys(self.run, task)

        def arguments() -> Iterator[_GroupArgs]:
            for result in results:
                valid, frames = _encode(result)
                payloads: dict[str, bytes] = {}
                if is_large(frames) and not all_inline:
                    payloads[keys.payload(result.lease.group_id, result.lease.nonce)] = frames[WHOLE]
                    frames = {BESIDE: b""}
                yield _GroupArgs(_result_args(valid, frames, floors, rules), frames, payloads)

        put = ("put", keys.clock, self.incarnation, epoch)

        def calls() -> Iterator[Call]:
            # each call is sent as soon as its results are encoded
            return (Beside((*put, *args), payloads) for args, payloads in _calls_of(arguments()))

        words: list[bytes] = []
        for reply in self.call_each(calls):
            if isinstance(reply, EpochMoved):
                self._floors.pop(task, None)
                break
            if isinstance(reply, Exception):
                raise reply
            words += reply
        return words

    def _epoch_floors(self, task: str) -> tuple[int, Floors]:
        """The live epoch, and the floors of those before it."""
        if task not in self._floors:
            clock = self.clock(task)
            self._floors[task] = (clock.epoch, clock.floors)
        return self._floors[task]

    def report_worker(self, worker: str, report: Mapping[str, Any]) -> None:
        """Store plain facts about a worker for monitors."""
        self.call("report_worker", self.keys.info, self.incarnation, worker, orjson.dumps(dict(report)))

    def forget_worker(self, worker: str) -> None:
        """Remove the report of a worker that stops."""
        self.call("forget_worker", self.keys.info, self.incarnation, worker)


def _decode_lease(task: str, nonce: str, fields: list[Any], payload: bytes | None) -> Lease:
    group_id, attempt, tries, step, evaluation, suspect, alone, letters, prompt, must_finish, kept, parts, _ = fields
    stored = {field.decode(errors="replace"): frame for field, frame in pairs(kept)}
    if payload is not None:
        stored[WHOLE] = payload
    return Lease(
        task=task,
        group_id=group_id,
        attempt=attempt,
        nonce=nonce,
        tries=tries,
        prompt=decode_prompt(prompt),
        samples=decode_kept(stored, letters.decode(), f"group {group_id} of task {task!r}"),
        step=step,
        evaluation=bool(evaluation),
        suspect=bool(suspect),
        alone=bool(alone),
        must_finish=bool(must_finish),
        parts=parts,
        salvaged_tokens=tokens_in_parts(frames_by_index(stored), group_size=len(letters)),
    )


def _encode(result: GroupResult) -> tuple[GroupResult, Mapping[str, bytes]]:
    """The result, or a failed one when it cannot be trained on, and its frames (see `rollq.buffer.wire.payload`): one
    of the whole group, or those of its new samples."""
    lease, samples = result.lease, result.samples
    try:
        frames = encode_payload(samples, _new_samples(result), group_size=len(lease.samples), max_bytes=MAX_GROUP_BYTES)
    except InvalidGroup as error:
        log.warning("group %d of task %r is invalid: %s", lease.group_id, lease.task, error)
        failed = Sample(segments=(), status=SampleStatus.FAILED, error=str(error))
        samples = (failed,) * len(lease.samples)
        return GroupResult(lease, samples, error=str(error), generate_s=result.generate_s), {}
    return result, frames


def _new_samples(result: GroupResult) -> list[int]:
    """The samples whose frames the buffer lacks. What it has in parts, it drops when the group is put."""
    lease = result.lease
    return [
        index
        for index, (sample, kept) in enumerate(zip(result.samples, lease.samples, strict=False))
        if sample is not kept or (lease.parts > 0 and sample is not EMPTY_SAMPLE)
    ]


def _part_args(part: SamplePart, floors: Floors, rules: TaskRules) -> list[Any]:
    """The arguments of `salvage` for one part; none if it cannot be encoded."""
    lease, sample = part.lease, part.sample
    try:
        encoded = encode_part(part)
    except InvalidGroup as error:
        log.warning("a part of group %d of task %r is invalid: %s", lease.group_id, lease.task, error)
        return []
    version = version_of(sample, floors, rules)
    return [
        lease.group_id, lease.attempt, lease.nonce, part.number, part.index, sample.status.value,
        _NO_VERSION if version is None else version, int(part.tokens_before == 0), encoded,
    ]  # fmt: skip


class _GroupArgs(NamedTuple):
    """One group in a call: its arguments, the frames among them, and payloads that are set beside it, by key."""

    args: list[Any]
    frames: Mapping[str, bytes]
    payloads: Mapping[str, bytes] = MappingProxyType({})

    @property
    def size_bytes(self) -> int:
        return NUMBERS_BYTES + sum(map(len, self.frames.values())) + sum(map(len, self.payloads.values()))


def _calls_of(groups: Iterable[_GroupArgs]) -> Iterator[tuple[list[Any], dict[str, bytes]]]:
    """The arguments and payloads of calls of limited size."""
    args: list[Any] = []
    payloads: dict[str, bytes] = {}
    size_bytes = 0
    for group in groups:
        if args and size_bytes + group.size_bytes > MAX_CALL_BYTES:
            yield args, payloads
            args, payloads, size_bytes = [], {}, 0
        args += group.args
        payloads = {**group.payloads, **payloads}  # of two results for one lease, the first one counts
        size_bytes += group.size_bytes
    if args:
        yield args, payloads


def _result_args(result: GroupResult, frames: Mapping[str, bytes], floors: Floors, rules: TaskRules) -> list[Any]:
    """The arguments of `put` for one group, in the order of `read_result` in `put.lua`: numbers, then frames."""
    lease, samples = result.lease, result.samples
    tokens = [sample.response_tokens for sample in samples]
    new = _new_samples(result) if frames else []  # an invalid group has none
    numbers = {
        "id": lease.group_id,
        "attempt": lease.attempt,
        "nonce": lease.nonce,
        "letters": "".join([sample.status for sample in samples]),
        **_version_args(samples, floors, rules),
        "filtered": int(result.filtered),
        **_reward_args(samples, tokens, rules),
        "new_tokens": sum([tokens[i] - lease.samples[i].response_tokens for i in new]) + lease.salvaged_tokens,
        "tokens": sum(tokens),
        "took_ms": round(result.generate_s * 1000),
        "error_text": result.error or _first_error(samples),
        "frame_count": len(frames),
        "rows": SampleRows.of(Samples.of(samples)).encode() if frames.keys() & {WHOLE, BESIDE} else b"",
    }
    return [*[numbers[name] for name in RESULT_ARGS], *chain.from_iterable(frames.items())]


def _version_args(samples: Sequence[Sample], floors: Floors, rules: TaskRules) -> dict[str, str | int]:
    """The version that each sample counts as, the oldest of them, and the newest version of any token."""
    counted = [version_of(sample, floors, rules) for sample in samples]
    known = [version for version in counted if version is not None]
    made_by = [span.version for sample in samples for segment in sample.segments for span in segment.versions]
    return {
        "versions": ",".join([_NO_VERSION if version is None else str(version) for version in counted]),
        "oldest": min(known, default=_NO_VERSION),
        "newest": max(made_by, default=_NO_VERSION),
    }


def _reward_args(samples: Sequence[Sample], tokens: Sequence[int], rules: TaskRules) -> dict[str, float]:
    """Mean reward, and how many samples have one, have passed, and how many response tokens they have."""
    rewarded = [(sample.reward, n) for sample, n in zip(samples, tokens, strict=True) if sample.reward is not None]
    return {
        "reward": sum([reward for reward, _ in rewarded]) / len(rewarded) if rewarded else 0.0,
        "rewarded": len(rewarded),
        "passed": sum([reward >= rules.pass_reward for reward, _ in rewarded]),
        "rewarded_tokens": sum([n for _, n in rewarded]),
    }


def _first_error(samples: Sequence[Sample]) -> str:
    return next((sample.error for sample in samples if sample.error and sample.status is SampleStatus.FAILED), "")


def version_of(sample: Sample, floors: Floors, rules: TaskRules) -> int | None:
    """The version that a sample counts as (see `counted_version`); None without tokens."""
    versions = [floors.counted(span.epoch, span.version) for segment in sample.segments for span in segment.versions]
    if not versions:
        return None
    if rules.token_threshold == rules.stale_threshold or brings_labels(sample.segments):
        return min(versions)
    newest = max(versions)  # a span that the environment wrote all of is as young as the model's tokens before it
    return counted_version(min(versions), newest, rules.stale_threshold, rules.token_threshold)


def _fences(leases: Iterable[Lease]) -> list[Any]:
    return [item for lease in leases for item in (lease.group_id, lease.attempt, lease.nonce)]


def _by_task(leases: Iterable[Lease]) -> dict[str, list[Lease]]:
    found: dict[str, list[Lease]] = {}
    for lease in leases:
        found.setdefault(lease.task, []).append(lease)
    return found


def _indices_by_task(results: Sequence[GroupResult]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for index, result in enumerate(results):
        found.setdefault(result.lease.task, []).append(index)
    return found
