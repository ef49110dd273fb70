"""The base of every part of the buffer: one run, its tasks, their clocks and rules."""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self

import redis
from redis.exceptions import RedisError

from rollq.buffer.calls.replies.tasks import Clock, Control
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import ConfigError, StoreLost
from rollq.buffer.payloads.interface import Frame, PayloadName
from rollq.buffer.payloads.router import Payloads, out_of_reach
from rollq.buffer.rules.codec import decode_rules
from rollq.buffer.rules.names import is_name
from rollq.buffer.rules.settings import PayloadSettings, TaskRules
from rollq.buffer.rules.staleness import Floors
from rollq.buffer.store.connection import Patience, check_policy
from rollq.buffer.store.keys import SCHEMA_VERSION, task_keys
from rollq.buffer.store.pubsub import EventKind, Events, channel_of
from rollq.buffer.store.redis_url import address
from rollq.buffer.store.run_store import RunStore
from rollq.buffer.store.servers import Servers
from rollq.buffer.values.memory_use import Fullness

_forged = LogOnce(logging.getLogger(__name__))

DEFAULT_PAYLOADS = PayloadSettings()
FIRST_REVISION = 1
"""Revision of the rules that a task was created with."""
_CONTROL_MOVED = -1
"""A function's reply if a control changed after its caller read it."""


class LiveEpoch(NamedTuple):
    """The live epoch, which late-registered tasks join."""

    epoch: int
    nonce: str
    version: int
    from_step: int


class _Known(NamedTuple):
    """A task's rules as this role last read them."""

    revision: int
    rules: TaskRules


class BufferCore(RunStore):
    """Runs and tasks: their creation, clocks and rules, which every role may read."""

    def __init__(
        self,
        servers: Servers,
        run: str,
        patience: Patience | None = None,
        payloads: PayloadSettings = DEFAULT_PAYLOADS,
    ) -> None:
        """Use `connect`. `servers` must answer in bytes."""
        super().__init__(servers, run, patience)
        self._rules: dict[str, _Known] = {}
        self.payloads = Payloads(self, payloads, lambda: self._patience)

    @classmethod
    def connect(
        cls,
        url: str,
        run: str,
        *,
        password: str | None = None,
        patience: Patience | None = None,
        payloads: PayloadSettings = DEFAULT_PAYLOADS,
    ) -> Self:
        """Open the buffer of `run` on the server or cluster at `url`, and load missing functions.

        `payloads` says where large frames are stored, the same for every role. Raises `ConfigError` (an invalid run
        name, or a payload URL that is neither a folder nor a bucket), `ServerUnavailable`, `ServerRefused`.
        """
        servers = cls.open_servers(url, run, password)
        try:
            buffer = cls(servers, run, patience, payloads)
            buffer._find_server_folder()
            return buffer
        except BaseException:
            servers.close()
            raise

    def _find_server_folder(self) -> None:
        self.payloads.find_server_folder(self._created_with)

    def _created_with(self) -> tuple[str, str] | None:
        """The run's stored incarnation, and where the run keeps payloads outside its servers, "" for nowhere; None
        before the run is created."""
        incarnation, place = self.send("HMGET", self.keys.info, "incarnation", "payloads")
        return (incarnation.decode(errors="replace"), (place or b"").decode()) if incarnation else None

    def close(self) -> None:
        """Close the connections and end every wait for a server."""
        super().close()
        self.payloads.close()

    # -- creation ---------------------------------------------------------------------------------------------------

    def create_run(self, *, model: str = "", tokenizer: str = "", identities: Mapping[str, str] | None = None) -> None:
        """Create the run, or compare its model and tokenizer fingerprints with the given fingerprints.

        `identities` holds other facts that roles must agree on, by name: environments and chat templates. Raises
        `RunMismatch`, with both values.
        """
        new, outside = secrets.token_hex(16), self.payloads.outside
        unmarked = None if self.send("EXISTS", self.keys.info) else outside
        if unmarked:  # before the run, so that a role that dies here leaves no run without a marker
            unmarked.mark(self.payloads.folder(new))
        place = self.payloads.place
        known = [text for pair in sorted((identities or {}).items()) for text in pair]
        incarnation = self.call("create_run", self.keys.info, new, SCHEMA_VERSION, model, tokenizer, place, *known)
        self._incarnation = self._checked_incarnation(incarnation)
        if unmarked and self._incarnation != new:
            unmarked.unmark(self.payloads.folder(new))
        self.check_payloads()

    def check_payloads(self) -> None:
        """Raise `ConfigError` unless this role has the run's payload store, and `StoreLost` without a run."""
        self._find_server_folder()  # the run may have been created since
        if self.payloads.outside and (self.payloads.ignores_url or not self._place_outside()):
            raise ConfigError(
                f"run {self.run!r} was created without payloads.url, so its payloads are with its servers: leave "
                "payloads.url out, or use a new run name"
            )
        self._check_reach()

    def _check_reach(self) -> None:
        """Raise `ConfigError` unless this process can reach the run's payloads."""
        if not (place := self._place_outside()):
            return
        if not self.payloads.outside:
            raise out_of_reach(self.run, place)
        self.payloads.outside.check_marker()

    def _place_outside(self) -> str:
        """Where the run keeps payloads outside its servers, "" for nowhere. Raises `StoreLost`."""
        return (self.send("HGET", self.keys.info, "payloads") or b"").decode() if self.incarnation else ""

    def _live_epoch(self) -> LiveEpoch:
        trainer, version = self.send_all(
            [("HMGET", self.keys.trainer, "epoch", "nonce", "from_step"), ("HGET", self.keys.model, "version")]
        )
        epoch, nonce, from_step = trainer
        return LiveEpoch(int(epoch or 0), (nonce or b"").decode(), int(version or -1), int(from_step or 0))

    def _discard_leftover(self, task: str) -> None:
        """Remove the clock of a task that has no groups and whose run is gone. A starting role creates such a clock if
        its run is deleted while the role sleeps."""
        leftover = self.send("HGET", task_keys(self.run, task).clock, "incarnation")
        live = self.send_all([("HMGET", self.keys.info, "incarnation", "restored_as")])[0]  # after `leftover` was read
        if leftover and leftover not in live and self.incarnation.encode() in live:
            self.call("discard_task", task_keys(self.run, task).clock, leftover)

    def _carry_epoch(self, task: str) -> range:
        """Bring a task's clock into the live epoch; returns the steps that may have batches."""
        live, more = self._live_epoch(), 1
        while more:
            more, last, first = self.call_task("task_begin_epoch", task, live.epoch, live.nonce, live.from_step)
        return range(first, last + 1)

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_payloads(self, task: str, named: Mapping[int, str]) -> dict[int, bytes]:
        """The groups' payloads, by group id, except payloads that are gone. `named` maps each group to its payload."""
        keys = task_keys(self.run, task)
        away = {group_id: name for group_id, text in named.items() if (name := PayloadName.parse(task, text))}
        in_slot = [group_id for group_id in named if group_id not in away]
        payloads = dict(zip(away, self.payloads.read(list(away.values()), _as_bytes), strict=True))
        replies = self.send_all([("GET", keys.payload(group_id, named[group_id])) for group_id in in_slot])
        payloads |= zip(in_slot, replies, strict=True)
        return {group_id: payload for group_id, payload in payloads.items() if payload is not None}

    def tasks(self) -> list[str]:
        """Names of the run's tasks, sorted. Raises `StoreLost` when the run is gone, which an empty list would hide.

        Leaves out a name that no task can have: someone else wrote it.
        """
        expected = self.incarnation
        # names first: if the incarnation is still the same afterwards, the names belong to it
        names, incarnation = self.send_all([("SMEMBERS", self.keys.tasks), ("HGET", self.keys.info, "incarnation")])
        if incarnation is None or incarnation.decode() != expected:
            raise StoreLost(
                f"run {self.run!r} is no longer in this store, or the store has a different incarnation of it"
            )
        if forged := sorted(name for name in names if not is_name(name)):
            _forged.warning(
                (self.run, len(forged)),
                "run %r: names that no task can have are left out: %d, such as %.60r; SREM %s removes them",
                self.run, len(forged), forged[0], self.keys.tasks,
            )  # fmt: skip
        return sorted(name.decode() for name in names if is_name(name))

    def train_tasks(self) -> list[str]:
        """Names of the trained tasks, sorted; the others are evaluations."""
        return [task for task in self.tasks() if self.rules(task).kind == "train"]

    def _check_is_sampled(self, task: str) -> None:
        """Raise `ConfigError` for an offline task, which is never sampled."""
        if self.rules(task).offline:
            raise ConfigError(f"task {task!r} is offline: groups are inserted into it, never sampled")

    def clock(self, task: str) -> Clock:
        """The task's clock. Raises `StoreLost` when the task, or this incarnation of the run, is gone."""
        fields: Mapping[bytes, bytes] = self.send("HGETALL", task_keys(self.run, task).clock)
        return self._decode_clock(task, fields)

    def clocks(self, tasks: Sequence[str]) -> dict[str, Clock]:
        """The clocks of several tasks, in one round trip. Raises `StoreLost` like `clock`."""
        replies = self.send_all([("HGETALL", task_keys(self.run, task).clock) for task in tasks])
        return {task: self._decode_clock(task, dict(pairs(flat))) for task, flat in zip(tasks, replies, strict=True)}

    def controls(self, tasks: Sequence[str]) -> dict[str, tuple[Control, str]]:
        """Each task's control, and the reason for `SLEEP`, in one round trip. Raises `StoreLost` like `clock`."""
        keys = [task_keys(self.run, task).clock for task in tasks]
        replies = self.send_all([("HMGET", key, "incarnation", "control", "sleep", "rules_revision") for key in keys])
        wanted: dict[str, tuple[Control, str]] = {}
        for task, (incarnation, control, sleep, revision) in zip(tasks, replies, strict=True):
            self._check_incarnation(task, incarnation and incarnation.decode())
            if task in self._rules and self._rules[task].revision != int(revision or FIRST_REVISION):
                self.clock(task)
            wanted[task] = (Control.SLEEP, sleep.decode()) if sleep else (Control(control.decode()), "")
        return wanted

    def _change_control(self, name: str, task: str, *args: Any) -> None:
        """Call a function that replaces the task's current control.

        A late copy of the call names a control that has been replaced, and changes nothing.
        """
        moved = True
        while moved:
            revision = self.send("HGET", task_keys(self.run, task).clock, "control_revision") or 0
            moved = self.call_task(name, task, *args, revision) == _CONTROL_MOVED

    def rules(self, task: str) -> TaskRules:
        """The task's rules as this role last read them: with its clock, or when `controls` found new rules."""
        if task not in self._rules:
            self.clock(task)
        return self._rules[task].rules

    def live_model(self) -> LiveModel | None:
        """The weights to serve; None before the first trainer."""
        fields = self.send("HMGET", self.keys.model, "epoch", "version", "digest", "uri", "awaited")
        if fields[0] is None:
            return None
        awaited = dict(entry.split(":") for entry in (fields[4] or b"").decode().split(",") if entry)
        digests = {int(version): digest for version, digest in awaited.items()}
        return LiveModel(int(fields[0]), int(fields[1]), fields[2].decode(), fields[3].decode(), digests)

    def events(
        self, *kinds: EventKind, task: str | None = None, others: Mapping[str, Callable[[Any], object]] | None = None
    ) -> Events:
        """Subscribe to the run's wake-ups.

        If given, `kinds` limits the subscription to wake-ups of these kinds, and `task` to wake-ups for this task and
        for the whole run. `others` maps other channels to functions that are called with each message there.
        """
        prefix = None if task is None else task_keys(self.run, task).prefix
        return Events(self.servers, self.keys.events, self._patience, kinds, prefix, others or {})

    def event_channel(self, kind: EventKind) -> str:
        """The channel for the run's wake-ups of one kind; `others` of `events` may have it as a key."""
        return channel_of(self.keys.events, kind)

    def is_on(self, client: redis.Redis) -> bool:
        """Whether the buffer is on one server, and `client` reaches it by the same address."""
        return [address(client)] == [address(server) for server in self.servers.primaries()]

    def memory(self) -> Fullness:
        """How full the server's memory is; on a cluster, the fullest primary's memory, since all primaries have
        payloads. Raises `ServerRefused` if a server may now evict keys: its policy can change at run time.

        Waits for an unavailable primary only if it holds keys of the run or of tasks that this role knows.
        """
        keys = [self.keys.info, *(task_keys(self.run, task).clock for task in self._rules)]

        def fullest() -> Fullness:
            by_client = {client: _memory(client) for client in {self.servers.of(key) for key in keys}}
            for client in self.servers.primaries():
                if client not in by_client:
                    with suppress(RedisError):
                        by_client[client] = _memory(client)
            return max(by_client.values(), key=lambda memory: memory.share)

        return self.servers.patiently(fullest, self._patience)

    def _check_incarnation(self, task: str, found: str | None) -> None:
        if found != self.incarnation:
            raise StoreLost(
                f"task {task!r} of run {self.run!r} is not in this store, or belongs to a different incarnation "
                "of the run"
            )

    def _decode_clock(self, task: str, raw: Mapping[bytes, bytes]) -> Clock:
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        self._check_incarnation(task, fields.get("incarnation"))
        read = _Known(int(fields.get("rules_revision", FIRST_REVISION)), decode_rules(fields))
        self._rules[task] = read
        return Clock(
            incarnation=fields["incarnation"],
            epoch=int(fields["epoch"]),
            step=int(fields["step"]),
            version=int(fields["version"]),
            committed=int(fields["committed"]),
            claimed_step=int(fields["claimed_step"]),
            checkpoint=int(fields["checkpoint"]),
            history=int(fields["history"]),
            first_manifest=int(fields["first_manifest"]),
            undone=int(fields["undone"]),
            control=Control.SLEEP if "sleep" in fields else Control(fields["control"]),
            control_reason=fields.get("sleep") or fields.get("control_reason", ""),
            rules=read.rules,
            rules_revision=read.revision,
            floors=Floors.decode(fields["floors"]),
        )


def _as_bytes(_: int, payload: Frame | None) -> bytes | None:
    return None if payload is None else bytes(payload)


def _memory(client: redis.Redis) -> Fullness:
    info: Mapping[str, Any] = client.info("memory")
    check_policy(client, info)
    return Fullness.of_memory(int(info["used_memory"]), int(info.get("maxmemory", 0)))


def pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The (name, value) pairs of a hash in a function's reply."""
    return zip(flat[::2], flat[1::2], strict=True)


def number(value: bytes) -> float:
    """Parse a number from a function: an int unless it has a fraction or an exponent."""
    return float(value) if b"." in value or b"e" in value else int(value)
