"""The worker's side of the buffer: leases groups and files results."""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf
from typing import Any

import orjson
from redis.exceptions import RedisError

from rollq.buffer.calls.core import BufferCore, pairs
from rollq.buffer.calls.orders import Fleet, Order
from rollq.buffer.calls.put_args import GroupArgs, calls_of, encode_result, part_args, result_args
from rollq.buffer.calls.replies.leases import Leased, Offer, PutOutcome, Renewed, SalvageOutcome
from rollq.buffer.calls.replies.tasks import UnderWay
from rollq.buffer.errors import EpochMoved, ServerRefused, StaleWorker
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_errors import code_of
from rollq.buffer.store.redis_functions import Beside, Call
from rollq.buffer.values.rollouts import AWAY, BESIDE, WHOLE, GroupResult, Lease, SamplePart, Status
from rollq.buffer.wire.group_fields import decode_kept, frames_by_index, is_large
from rollq.buffer.wire.parts import tokens_in_parts
from rollq.buffer.wire.prompts import decode_prompt

log = logging.getLogger(__name__)

UNDER_WAY = (Status.PENDING, Status.RUNNING)
RENEW_EVERY_S = 1.0
"""How often leases are renewed while their groups' external payloads are written."""
PAYLOAD = 14
"""The index of the payload's name among a lease's fields, from 0."""


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
        """Lease up to `n` of the best pending groups of `tasks`, for weights (`epoch`, `version`).

        `worker` names this incarnation of the worker. `suspects_held` counts the suspects among its leases, and `idle`
        is true if the worker holds no lease. Raises `StaleWorker` if these weights would already be too old at the next
        step, and `StoreLost`.
        """
        leased = self._lease(tasks, n, worker, f"{epoch}:{version}", suspects_held, idle)
        gone, cut_off = self.renew(leased.leases)  # confirms that the leases have arrived
        if not gone and not cut_off:
            return leased
        held = [replace(lease, cut_off=lease in cut_off) for lease in leased.leases if lease not in gone]
        return leased._replace(leases=tuple(held))

    def _lease(self, tasks: Sequence[str], n: int, worker: str, weights: str, suspects_held: int, idle: bool) -> Leased:
        leased: list[Lease] = []
        shares = self._shares(tasks, n, weights)
        # The task of a drain comes first: after leases of another task, the caller would not be idle for it.
        for task in sorted(shares, key=lambda task: task != self._drained_for):
            nonce, share, first = secrets.token_hex(8), shares[task], int(idle and not leased)
            try:
                reply = self.call_task("lease", task, worker, nonce, *weights.split(":"), share, suspects_held, first)
            except StaleWorker:
                if leased:  # leases that the caller never receives would look like a death
                    break
                raise
            if reply[0] == 1:
                self._drained_for = task
                return Leased(tuple(leased), drain=True)
            payloads = self.read_payloads(task, named_payloads(reply[1:]))
            leases = [decode_lease(task, nonce, fields, payloads.get(fields[0])) for fields in reply[1:]]
            leased += leases
            suspects_held += sum(lease.suspect for lease in leases)
            if any(lease.alone for lease in leases):
                break
        return Leased(tuple(leased), drain=False)

    def _shares(self, tasks: Sequence[str], n: int, weights: str) -> dict[str, int]:
        """Task -> its number of groups among the `n` best pending groups that weights ("epoch:version") may serve."""
        if len(tasks) == 1:
            return {tasks[0]: n}
        tasks = self._tasks_for(tasks, weights)
        heads: list[list[bytes]] = self.send_all(
            [("ZRANGE", task_keys(self.run, task).status(Status.PENDING), 0, n - 1, "WITHSCORES") for task in tasks]
        )
        scores = [(float(score), index) for index, head in enumerate(heads) for score in head[1::2]]
        counted = Counter(index for _, index in sorted(scores)[:n])
        return {tasks[index]: counted[index] for index in sorted(counted)}

    def _tasks_for(self, tasks: Sequence[str], weights: str) -> list[str]:
        """The tasks without evaluations of any weights other than "epoch:version"."""
        evaluations = [task for task in tasks if self.rules(task).kind == "eval"]
        pins = self.send_all([("HGET", task_keys(self.run, task).clock, "pin") for task in evaluations])
        others = {task for task, pin in zip(evaluations, pins, strict=True) if pin != weights.encode()}
        return [task for task in tasks if task not in others]

    def evaluates_others(self, tasks: Sequence[str], *, epoch: int, version: int) -> bool:
        """Whether an evaluation among `tasks` is open for other weights, so that these weights cannot take part."""
        evaluations = [task for task in tasks if self.rules(task).kind == "eval"]
        clocks = [("HMGET", task_keys(self.run, task).clock, "pin", "open_evaluations") for task in evaluations]
        pin = f"{epoch}:{version}".encode()
        return any(int(is_open or 0) > 0 and pinned != pin for pinned, is_open in self.send_all(clocks))

    def renew(self, leases: Sequence[Lease]) -> Renewed:
        """Confirm leases and extend their deadlines."""
        by_task = leases_by_task(leases)
        calls = [
            ("renew", task_keys(self.run, task).clock, self.incarnation, *fences(of_task))
            for task, of_task in by_task.items()
        ]
        gone, cut_off = list[Lease](), list[Lease]()
        for of_task, (gone_at, cut_off_at) in zip(by_task.values(), self.call_all(calls), strict=True):
            gone += [of_task[at] for at in gone_at]
            cut_off += [of_task[at] for at in cut_off_at]
        return Renewed(gone, cut_off)

    def hand_back(self, leases: Sequence[Lease], *, counted: bool = False, error: str | None = None) -> int:
        """Hand unfinished groups back. With `counted`, the try counts, and `error` says why it failed; groups without
        tries left fail. Returns the number of groups handed back.
        """
        return sum(
            int(self.call_task("hand_back", task, int(counted), error or "", *fences(of_task)))
            for task, of_task in leases_by_task(leases).items()
        )

    def drop_too_long(self, lease: Lease, tokens: int, error: str) -> bool:
        """Drop a group whose prompt has too many `tokens`, and have producers skip its row from now on. A group that a
        batch waits for fails with `error`. Returns False if the lease is no longer the caller's."""
        return bool(self.call_task("drop_too_long", lease.task, error, tokens, *fences([lease])))

    def salvage(self, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
        """Keep parts of unfinished samples; returns an outcome for each.

        If the worker dies, the group's next lease continues from these tokens. A part is kept only while its lease is
        the caller's, and after all of the group's parts with smaller numbers. If a part cannot be encoded, only that
        part is refused. Harmless to repeat.
        """
        return self._keep("salvage", parts)

    def record(self, calls: Sequence[SamplePart]) -> list[SalvageOutcome]:
        """Like `salvage`, for agents' calls that are not answered yet; works even on a full server."""
        return self._keep("record", calls)

    def _keep(self, function: str, parts: Sequence[SamplePart]) -> list[SalvageOutcome]:
        outcomes = dict.fromkeys(range(len(parts)), SalvageOutcome.REFUSED)
        for task, indices in indices_by_task(parts).items():
            (_, floors), rules = self._epoch_floors(task), self.rules(task)
            clock = task_keys(self.run, task).clock
            encoded = {index: args for index in indices if (args := part_args(parts[index], floors, rules))}
            portions = calls_of(GroupArgs(args, {"": args[-1]}) for args in encoded.values())
            replies = self.call_all([(function, clock, self.incarnation, *args) for args, _ in portions])
            words = map(bytes.decode, chain.from_iterable(replies))
            outcomes |= zip(encoded, map(SalvageOutcome, words), strict=True)
        return [outcomes[index] for index in range(len(parts))]

    def put(self, results: Sequence[GroupResult]) -> list[PutOutcome]:
        """File results, in order. No other call files the result of a lease.

        A result that cannot be trained on (see `check_group`) is filed as failed, with the reason. Large samples take
        time to write: the caller renews the leases until the call returns, as workers do in another thread. Harmless to
        repeat: for a result that was filed before, even by an earlier try of this call, it returns `DUPLICATE`.
        """
        outcomes: dict[int, PutOutcome] = {}
        for task, indices in indices_by_task(results).items():
            while indices:
                words = self._put(task, [results[index] for index in indices])
                outcomes.update((index, PutOutcome(word.decode())) for index, word in zip(indices, words, strict=False))
                indices = indices[len(words) :]
        return [outcomes[index] for index in range(len(results))]

    def _put(self, task: str, results: Sequence[GroupResult]) -> list[bytes]:
        """File one task's results; returns an outcome for each, up to the first result that meets a new epoch."""
        try:
            return self._put_with(task, results)
        except ServerRefused as error:
            if not (isinstance(error.__cause__, RedisError) and code_of(error.__cause__) == "OOM"):
                raise
        # a full server refuses to set keys, but `put` may still file results there
        return self._put_with(task, results, all_inline=True)

    def _put_with(self, task: str, results: Sequence[GroupResult], *, all_inline: bool = False) -> list[bytes]:
        epoch, floors = self._epoch_floors(task)
        keys = task_keys(self.run, task)

        def arguments() -> Iterator[GroupArgs]:
            return (self._encode(task, result, epoch, floors, all_inline=all_inline) for result in results)

        groups: Callable[[], Iterable[GroupArgs]] = arguments
        if self.payloads:  # external payloads are stored before a group names them
            encoded: list[GroupArgs] = []
            renewed_s = time.monotonic() if self.payloads.notices_deletion else -inf
            with self.payloads.writing() as write:
                for group in arguments():
                    encoded.append(group)
                    if group.away and time.monotonic() - renewed_s > RENEW_EVERY_S:
                        # raises if the run was deleted: nothing would ever remove its payloads
                        self.renew([result.lease for result in results])
                        renewed_s = time.monotonic()
                    for name, payload in group.away.items():
                        write(name, payload)
            groups = partial(iter, encoded)

        put = ("put", keys.clock, self.incarnation, epoch, floors.encode())

        def calls() -> Iterator[Call]:
            # each call is sent as soon as its results are encoded
            return (Beside((*put, *args), payloads) for args, payloads in calls_of(groups()))

        words: list[bytes] = []
        for reply in self.call_each(calls):
            if isinstance(reply, EpochMoved):
                self._floors.pop(task, None)
                break
            if isinstance(reply, Exception):
                raise reply
            words += reply
        return words

    def _encode(self, task: str, result: GroupResult, epoch: int, floors: Floors, *, all_inline: bool) -> GroupArgs:
        """Encode a result as arguments, with each frame where it belongs. With `all_inline`, all frames pass through
        the function."""
        rules, lease = self.rules(task), result.lease
        encoded = encode_result(result, None if all_inline else self.payloads.pieces_from)
        frames = encoded.frames
        size_bytes = sum(map(len, frames.values()))
        args = partial(result_args, encoded, epoch=epoch, floors=floors, rules=rules, size_bytes=size_bytes)
        if WHOLE in frames and not all_inline:
            if place := self.payloads.place_for(size_bytes):
                name = PayloadName.new(task, place, lease.group_id, lease.nonce)
                named = {AWAY: name.encoded.encode()}
                return GroupArgs(args(named), named, away={name: frames[WHOLE]})
            if is_large(size_bytes):
                key = task_keys(self.run, task).payload(lease.group_id, lease.nonce)
                return GroupArgs(args({BESIDE: b""}), {BESIDE: b""}, {key: bytes(frames[WHOLE])})
        inline = {field: bytes(frame) for field, frame in frames.items()}
        return GroupArgs(args(inline), inline)

    def _epoch_floors(self, task: str) -> tuple[int, Floors]:
        """The live epoch, and earlier epochs' floors."""
        if task not in self._floors:
            clock = self.clock(task)
            self._floors[task] = (clock.epoch, clock.floors)
        return self._floors[task]

    def report_worker(self, worker: str, report: Mapping[str, Any]) -> Order:
        """Store plain facts about a worker for monitors; returns the operator's order for this worker."""
        reply = self.call("report_worker", self.keys.info, self.incarnation, worker, orjson.dumps(dict(report)))
        return Order(reply.decode())

    def join_fleet(self, worker: str, places: int, *, load: float, tokens_per_s: float, open_samples: int = 0) -> Fleet:
        """Record a worker's capacity; returns the total capacity of all workers that recorded theirs within 10 s.

        `places` is the number of samples that the worker generates at once, 0 if it takes no groups. `load` is the
        average number of samples in flight. `tokens_per_s` is the worker's speed under an average worker's load, 0.0
        while unknown. `open_samples` is the number of samples that it has to generate now.
        """
        numbers = (places, round(load), round(tokens_per_s), open_samples)
        return Fleet(*self.call("join_fleet", self.keys.info, self.incarnation, worker, *numbers))

    def under_way(self, tasks: Sequence[str]) -> UnderWay:
        """How many groups of `tasks` are pending and how many are leased."""
        keys = [task_keys(self.run, task).status(status) for status in UNDER_WAY for task in tasks]
        counts: list[int] = self.send_all([("ZCARD", key) for key in keys])
        return UnderWay(sum(counts[: len(tasks)]), sum(counts[len(tasks) :]))

    def forget_worker(self, worker: str) -> None:
        """Remove the report of a stopping worker."""
        self.call("forget_worker", self.keys.info, self.incarnation, worker)


def named_payloads(described: Sequence[list[Any]]) -> dict[int, str]:
    """The payload names, by group, in leases that the function `lease` or `borrow` returned."""
    return {fields[0]: fields[PAYLOAD].decode() for fields in described if fields[PAYLOAD]}


def decode_lease(task: str, nonce: str, fields: list[Any], payload: bytes | None) -> Lease:
    """Decode a lease that the function `lease` described with these fields; `payload` is the frame that they name."""
    (
        group_id, attempt, tries, step, evaluation, suspect, alone, admitted_ms, leased_ms, letters, prompt,
        must_finish, frames, parts, large, expected_tokens, row,
    ) = fields  # fmt: skip
    name = f"group {group_id} of task {task!r}"
    stored = {field.decode(errors="replace"): frame for field, frame in pairs(frames)}
    if payload is not None:
        stored[WHOLE] = payload
    elif large:
        log.error("%s: the frame of its samples is gone from the store; generating the samples again", name)
    return Lease(
        task=task,
        group_id=group_id,
        attempt=attempt,
        nonce=nonce,
        tries=tries,
        prompt=replace(decode_prompt(prompt), row=int(row) if row else None),
        samples=decode_kept(stored, letters.decode(), name),
        step=step,
        evaluation=bool(evaluation),
        suspect=bool(suspect),
        alone=bool(alone),
        must_finish=bool(must_finish),
        parts=parts,
        salvaged_tokens=tokens_in_parts(frames_by_index(stored), group_size=len(letters)),
        expected_tokens=float(expected_tokens or 0),
        admitted_ms=admitted_ms,
        leased_ms=leased_ms,
    )


def fences(leases: Iterable[Lease]) -> list[Any]:
    """The arguments that prove to a function that these leases are the caller's."""
    return [item for lease in leases for item in (lease.group_id, lease.attempt, lease.nonce)]


def leases_by_task(leases: Iterable[Lease]) -> dict[str, list[Lease]]:
    """The leases by task, in order."""
    by_task: dict[str, list[Lease]] = {}
    for lease in leases:
        by_task.setdefault(lease.task, []).append(lease)
    return by_task


def indices_by_task(held: Sequence[GroupResult | SamplePart | Offer]) -> dict[str, list[int]]:
    """Task -> the indices in `held` of items whose lease is in this task."""
    by_task: dict[str, list[int]] = {}
    for index, item in enumerate(held):
        by_task.setdefault(item.lease.task, []).append(index)
    return by_task
