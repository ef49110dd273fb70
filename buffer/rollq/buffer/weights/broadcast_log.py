"""The log in Redis with which the members of a weight broadcast agree. A broadcast sends weights from the trainer
straight into engines. No torch.

Each publication has one log (a stream). The trainer and the workers append to it and read it from the start. A
broadcast has attempts, one after another: workers report that they are ready, the trainer names the members once, they
meet, and the attempt is over. A worker that comes while no attempt is open says so, and the trainer opens another
attempt when it can.

Invariant: the order of the log decides, and only the trainer names members. So the trainer and the workers agree on the
members, even if one of them dies, is slow, or writes an entry twice.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel, FiniteFloat, PositiveInt, ValidationError

from rollq.buffer.calls.core import BufferCore
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import TTL_S, StoredWeights

log = logging.getLogger(__name__)

URI_PREFIX = "nccl:"
LOOK_S = 1.0
"""How often a wait checks its condition while nothing is written, in seconds."""


class TensorSpec(NamedTuple):
    """A tensor that will be sent; `dtype` is torch's name (`bfloat16`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Attempt:
    """One attempt. `ready` maps workers to their numbers of ranks, and `members` maps them to their first ranks."""

    ready: dict[str, int] = field(default_factory=dict)
    members: dict[str, int] | None = None
    meeting: dict[str, Any] = field(default_factory=dict)  # where and how they meet, for the engines
    took: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)  # workers that cannot take the weights, and why
    over: str | None = None  # why it failed; empty when it succeeded

    @property
    def open(self) -> bool:
        """Whether workers may still join."""
        return self.members is None and self.over is None


@dataclass(slots=True)
class Broadcast:
    """A log's content. `late` holds workers that came while no attempt was open, after the last attempt was opened."""

    digest: str
    tensors: tuple[TensorSpec, ...]
    join_s: float
    timeout_s: float
    probe: Probe | None = None
    attempts: list[Attempt] = field(default_factory=lambda: [Attempt()])
    late: set[str] = field(default_factory=set)

    @property
    def current(self) -> Attempt:
        """The attempt under way, or else the last attempt."""
        return self.attempts[-1]

    @property
    def took(self) -> set[str]:
        """The workers that have the weights."""
        return set().union(*(attempt.took for attempt in self.attempts))


class _Opening(BaseModel):
    """The first entry, which the trainer writes."""

    tensors: list[TensorSpec]
    join_s: FiniteFloat
    timeout_s: FiniteFloat
    probe: str | None = None


class _Entry(BaseModel):
    """Any other entry. It is about attempt number `attempt` (from 1), or says that a worker is `late`."""

    attempt: PositiveInt = 1
    opened: bool = False
    ready: str | None = None
    ranks: PositiveInt = 1
    members: dict[str, PositiveInt] | None = None
    meeting: dict[str, Any] = {}
    took: str | None = None
    broken: str | None = None
    error: str = ""
    over: str | None = None
    late: str | None = None


def first_entry(raw: bytes) -> Broadcast:
    """The broadcast that this entry opens. Raises `WeightsError` for any other entry."""
    try:
        opening = _Opening.model_validate_json(raw)
    except ValidationError as error:
        raise _gone() from error
    probe = None if opening.probe is None else Probe.decode(opening.probe.encode())
    digest = hashlib.sha256(raw).hexdigest()
    return Broadcast(digest, tuple(opening.tensors), opening.join_s, opening.timeout_s, probe)


def apply_entry(found: Broadcast, raw: bytes) -> None:
    """Add an entry to a broadcast. An entry that is repeated, too late or too early changes nothing. Raises
    `WeightsError` for an unreadable entry.
    """
    try:
        entry = _Entry.model_validate_json(raw)
    except ValidationError as error:
        raise WeightsError(f"an entry of a weight broadcast cannot be read: {raw!r:.200}: {error}") from error
    if entry.opened:
        if entry.attempt == len(found.attempts) + 1 and found.current.over is not None:
            found.attempts.append(Attempt())
            found.late.clear()
    elif entry.attempt > len(found.attempts):
        return
    elif entry.late is not None:
        found.late.add(entry.late)
    else:
        _apply_to_attempt(found.attempts[entry.attempt - 1], entry)


def _apply_to_attempt(attempt: Attempt, entry: _Entry) -> None:
    if attempt.open:
        _apply_to_open(attempt, entry)
    if entry.took is not None:
        attempt.took.add(entry.took)
    if entry.broken is not None:
        attempt.broken[entry.broken] = entry.error
    if entry.over is not None and attempt.over is None:
        attempt.over = entry.over


def _apply_to_open(attempt: Attempt, entry: _Entry) -> None:
    if entry.ready is not None:
        attempt.ready[entry.ready] = entry.ranks
    if entry.members is not None:
        attempt.members, attempt.meeting = entry.members, entry.meeting


def assign_ranks(ready: Mapping[str, int]) -> dict[str, int]:
    """Each worker's first rank, in the order of worker names. Rank 0 is the trainer."""
    first, assigned = 1, {}
    for worker in sorted(ready):
        assigned[worker] = first
        first += ready[worker]
    return assigned


def round_number(uri: str) -> int | None:
    """The number of the broadcast that `uri` names; None for stored weights."""
    number = uri.removeprefix(URI_PREFIX)
    return int(number) if number != uri and number.isdecimal() else None


class BroadcastLog:
    """One broadcast's log. Only one thread may read it at a time; other threads may call `append` and `keep`."""

    def __init__(self, buffer: BufferCore, number: int) -> None:
        self.number = number
        self._buffer = buffer
        self._key = buffer.keys.round(number)
        self._found: Broadcast | None = None
        self._last = b"0"

    @classmethod
    def open(
        cls,
        buffer: BufferCore,
        tensors: Iterable[TensorSpec],
        *,
        join_s: float,
        timeout_s: float,
        probe: Probe | None = None,
    ) -> tuple["BroadcastLog", StoredWeights]:
        """Open a broadcast with its first attempt, and give its weights a unique name."""
        specs = [list(spec) for spec in tensors]
        entry = {"tensors": specs, "join_s": join_s, "timeout_s": timeout_s, "nonce": secrets.token_hex(8)}
        if probe is not None:
            entry["probe"] = probe.encode().decode()
        raw = orjson.dumps(entry)
        number = _append(buffer, 0, raw)
        return cls(buffer, number), StoredWeights(f"{URI_PREFIX}{number}", hashlib.sha256(raw).hexdigest())

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one entry. Harmless to repeat. Raises `StoreLost`, `ServerError`."""
        _append(self._buffer, self.number, orjson.dumps(entry))

    def read(self) -> Broadcast:
        """Read the log up to now. Raises `WeightsError` if the log is gone."""
        entries = self._buffer.send("XRANGE", self._key, b"(" + self._last, "+")
        for at, fields in entries:
            if self._found is None:
                self._found = first_entry(fields[b"entry"])
            else:
                _apply(self._found, fields[b"entry"])
            self._last = at
        if self._found is None:
            raise _gone()
        return self._found

    def wait(self, condition: Callable[[Broadcast], bool], timeout_s: float) -> Broadcast:
        """Read until `condition` holds, for at most `timeout_s`; returns the log's content at the end."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            broadcast = self.read()
            left_s = deadline_s - time.monotonic()
            if condition(broadcast) or left_s <= 0:
                return broadcast
            block_ms = max(int(1000 * min(left_s, LOOK_S)), 1)
            self._buffer.send("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", self._key, self._last)

    def keep(self) -> None:
        """Extend the log's life, for workers that come late."""
        self._buffer.send("EXPIRE", self._key, TTL_S)


def _apply(found: Broadcast, raw: bytes) -> None:
    """Add an entry, or skip an unreadable entry. All members do this, so they still agree."""
    try:
        apply_entry(found, raw)
    except WeightsError as error:
        log.warning("%s", error)


def _append(buffer: BufferCore, number: int, raw: bytes) -> int:
    return int(buffer.call("append_round", buffer.keys.info, buffer.incarnation, number, TTL_S, raw))


def _gone() -> WeightsError:
    return WeightsError("this weight broadcast is no longer in Redis: wait for the next one, or publish again")
