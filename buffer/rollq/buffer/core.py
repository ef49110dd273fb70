"""What every part of the buffer stands on: one server, one run, its incarnation, its tasks' clocks and rules."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self

import redis

from rollq.buffer.errors import ConfigError, StoreLost
from rollq.buffer.replies import Clock, Control
from rollq.buffer.settings import TaskRules
from rollq.buffer.store import functions
from rollq.buffer.store.connection import Patience, connect, patiently
from rollq.buffer.store.events import Events
from rollq.buffer.store.keys import RunKeys, TaskKeys
from rollq.buffer.store.pipelining import Command, pipeline

_TEXT_RULES = ("kind", "order", "expiry", "stragglers", "resume")
_NEVER = 2**31 - 1


class BufferCore:
    """Connection, creation and clocks. Thread-safe; holds no state that another process could not rebuild."""

    def __init__(self, client: redis.Redis, run: str, patience: Patience) -> None:
        """Use `connect`. `client` must answer in bytes."""
        self.client = client
        self.run = run
        self.keys = RunKeys(run)
        self.patience = patience
        self._incarnation: str | None = None
        self._rules: dict[str, TaskRules] = {}

    @classmethod
    def connect(cls, url: str, run: str, *, password: str | None = None, patience: Patience | None = None) -> Self:
        """Open the buffer of `run` on the server at `url`, and load the functions where they are missing.

        Raises ConfigError (the run's name), ServerUnavailable, ServerRefused, RunMismatch.
        """
        RunKeys(run)
        client = connect(url, password)
        try:
            functions.load_library(client)
        except BaseException:
            client.close()
            raise
        return cls(client, run, patience or Patience())

    def close(self) -> None:
        """Close the connections, and end every wait for the server."""
        self.patience.closed.set()
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- creation ---------------------------------------------------------------------------------------------------

    def create_run(self, *, model: str = "", tokenizer: str = "") -> None:
        """Create the run, or compare the fingerprints of model and tokenizer with those it was created with.

        Raises RunMismatch, with both values.
        """
        reply = self._call("create_run", self.keys.info, secrets.token_hex(16), functions.SCHEMA, model, tokenizer)
        self._incarnation = reply.decode()

    @property
    def incarnation(self) -> str:
        """The run's identity in this store, learnt once. Raises StoreLost when the run is not there."""
        if self._incarnation is None:
            found = patiently(self.client, lambda: self.client.hget(self.keys.info, "incarnation"), self.patience)
            if not isinstance(found, bytes):
                raise StoreLost(
                    f"run {self.run!r} is not in this store: it was never created here (a producer, a worker or `rollq "
                    "train` does), or the store lost its data"
                )
            self._incarnation = found.decode()
        return self._incarnation

    def register_task(self, task: str, rules: TaskRules) -> None:
        """Create the task with its rules, or compare them with those it has. Raises RunMismatch naming the rule."""
        keys = task_keys(self.run, task)
        epoch, nonce, version, from_step = self._call("add_task", self.keys.info, self.incarnation, task)
        fields = [item for pair in encode_rules(rules).items() for item in pair]
        self._call(
            "register_task", keys.clock, self.incarnation, self.keys.events, epoch, nonce, version, from_step, *fields
        )
        self._rules[task] = rules

    # -- reading ----------------------------------------------------------------------------------------------------

    def tasks(self) -> list[str]:
        """Names of the run's tasks, sorted. Raises StoreLost when the run is gone, which an empty list would hide."""
        known = self.incarnation
        reads = [("HGET", self.keys.info, "incarnation"), ("SMEMBERS", self.keys.tasks)]
        found, names = self._read_at_once(reads)
        if found is None or found.decode() != known:
            raise StoreLost(f"run {self.run!r} is not in this store any more, or another incarnation of it is")
        return sorted(name.decode() for name in names)

    def train_tasks(self) -> list[str]:
        """Names of the tasks that are trained on, sorted; the others are evaluations."""
        return [task for task in self.tasks() if self.rules(task).kind == "train"]

    def set_control(self, task: str, control: Control, reason: str = "", *, only_from: Control | None = None) -> None:
        """Let a task's production go on, pause or end, and say why; engines that sleep stay asleep.

        `only_from`: nothing happens when the task has another control by then. Raises ConfigError for `SLEEP`, which is
        the trainer's to want.
        """
        if control is Control.SLEEP:
            raise ConfigError("engines are put to sleep by the trainer that needs their memory")
        self._call_task("set_control", task, control.value, reason, "" if only_from is None else only_from.value)

    def clock(self, task: str) -> Clock:
        """The task's clock. Raises StoreLost when the task, or this incarnation of the run, is gone."""
        fields: Mapping[bytes, bytes] = self._read(lambda: self.client.hgetall(task_keys(self.run, task).clock))
        return self._decode_clock(task, fields)

    def controls(self, tasks: Sequence[str]) -> dict[str, tuple[Control, str]]:
        """What is wanted of each task, and for `SLEEP` why, in one trip. Raises StoreLost like `clock`."""
        keys = [task_keys(self.run, task).clock for task in tasks]
        found = self._read_all([("HMGET", key, "incarnation", "control", "sleep") for key in keys])
        wanted: dict[str, tuple[Control, str]] = {}
        for task, (incarnation, control, sleep) in zip(tasks, found, strict=True):
            self._check_incarnation(task, incarnation and incarnation.decode())
            wanted[task] = (Control.SLEEP, sleep.decode()) if sleep else (Control(control.decode()), "")
        return wanted

    def rules(self, task: str) -> TaskRules:
        """The rules that the task was registered with; they never change."""
        if task not in self._rules:
            self._rules[task] = self.clock(task).rules
        return self._rules[task]

    def events(self, *kinds: str) -> Events:
        """A subscription to the run's wake-ups, or to those of some kinds; see `Events`."""
        return Events(self.client, self.keys.events, self.patience, kinds)

    def memory_fraction(self) -> float:
        """Used share of the server's `maxmemory`, 0 without a limit."""
        info: Mapping[str, Any] = self._read(lambda: self.client.info("memory"))
        limit = int(info.get("maxmemory", 0))
        return int(info["used_memory"]) / limit if limit else 0.0

    # -- for the parts ----------------------------------------------------------------------------------------------

    def _call(self, name: str, key: str, *args: Any) -> Any:
        return functions.call(self.client, self.patience, name, key, *args)

    def _call_task(self, name: str, task: str, *args: Any) -> Any:
        return self._call(name, task_keys(self.run, task).clock, self.incarnation, *args)

    def _call_all(self, calls: Sequence[Command]) -> list[Any]:
        """Functions in one trip; `calls` are (name, key, arguments ...). Raises the first error, when all have run."""
        replies = functions.call_all(self.client, self.patience, lambda: calls)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _read(self, command: Any) -> Any:
        return patiently(self.client, command, self.patience)

    def _read_all(self, commands: Sequence[Command]) -> list[Any]:
        """Plain commands in one trip."""
        return pipeline(self.client, self.patience, lambda: commands, _good)

    def _read_at_once(self, commands: Sequence[Command]) -> list[Any]:
        """Plain commands in one trip, between which nothing happens."""
        replies: list[Any] = self._read_all([("MULTI",), *commands, ("EXEC",)])[-1]
        return replies

    def _check_incarnation(self, task: str, found: str | None) -> None:
        if found != self.incarnation:
            raise StoreLost(
                f"task {task!r} of run {self.run!r} is not in this store, or belongs to another incarnation of the run"
            )

    def _decode_clock(self, task: str, raw: Mapping[bytes, bytes]) -> Clock:
        fields = {name.decode(): value.decode() for name, value in raw.items()}
        self._check_incarnation(task, fields.get("incarnation"))
        return Clock(
            incarnation=fields["incarnation"],
            epoch=int(fields["epoch"]),
            step=int(fields["step"]),
            version=int(fields["version"]),
            committed=int(fields["committed"]),
            claimed_step=int(fields["claimed_step"]),
            checkpoint=int(fields["checkpoint"]),
            history=int(fields["history"]),
            control=Control.SLEEP if "sleep" in fields else Control(fields["control"]),
            control_reason=fields.get("sleep") or fields.get("control_reason", ""),
            rules=decode_rules(fields),
            floors={int(name[6:]): int(value) for name, value in fields.items() if name.startswith("floor:")},
        )


def _good(_: int, reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


@lru_cache(maxsize=1024)
def task_keys(run: str, task: str) -> TaskKeys:
    """Keys of a task; checked and built once."""
    return TaskKeys(run, task)


def encode_rules(rules: TaskRules) -> dict[str, str | int]:
    """A task's rules as the fields of its clock."""
    return {
        "threshold": rules.stale_threshold,
        "batch_groups": rules.batch_groups,
        "group_size": rules.group_size,
        "max_staleness": rules.max_staleness,
        "sync_interval": rules.sync_weights_interval,
        "order": rules.order,
        "expiry": rules.expiry,
        "kind": rules.kind,
        "schedule": ",".join(f"{step}:{groups}" for step, groups in rules.schedule),
        "expired": "drop" if rules.tail_batch_trigger_size < 0 else "reroll",
        "tail_batch_trigger": rules.tail_batch_trigger_size,
        "interruptions": _NEVER if rules.tail_batch_max_tries is None else rules.tail_batch_max_tries,
        "stragglers": rules.stragglers,
        "token_staleness": rules.max_staleness if rules.max_token_staleness is None else rules.max_token_staleness,
        "token_shift": rules.token_threshold - rules.stale_threshold,
        "max_uses": rules.max_uses,
        "cooldown": rules.reuse_cooldown_steps,
        "keep_window": rules.keep_window,
        "prompt_stats": int(rules.prompt_stats),
        "pass_reward": str(rules.pass_reward),
        "partial": int(rules.partial_rollout),
        "min_valid": rules.group_size if rules.min_valid_samples is None else rules.min_valid_samples,
        "max_tries": rules.max_tries,
        "max_deaths": rules.max_deaths,
        "lease_ms": round(rules.lease_s * 1000),
        "audit": rules.audit_groups,
        "max_uncheckpointed": rules.max_uncheckpointed_steps,
        "resume": rules.resume,
    }


def decode_rules(fields: Mapping[str, str]) -> TaskRules:
    """The inverse of `encode_rules`."""
    return TaskRules.model_validate(
        {
            "batch_groups": int(fields["batch_groups"]),
            "group_size": int(fields["group_size"]),
            "max_staleness": int(fields["max_staleness"]),
            "sync_weights_interval": int(fields["sync_interval"]),
            "schedule": [entry.split(":") for entry in fields["schedule"].split(",") if entry],
            "tail_batch_trigger_size": int(fields["tail_batch_trigger"]),
            "tail_batch_max_tries": None if int(fields["interruptions"]) == _NEVER else int(fields["interruptions"]),
            "max_token_staleness": int(fields["token_staleness"]),
            "max_uses": int(fields["max_uses"]),
            "reuse_cooldown_steps": int(fields["cooldown"]),
            "keep_window": int(fields["keep_window"]),
            "prompt_stats": fields["prompt_stats"] == "1",
            "pass_reward": float(fields["pass_reward"]),
            "partial_rollout": fields["partial"] == "1",
            "min_valid_samples": int(fields["min_valid"]),
            "max_tries": int(fields["max_tries"]),
            "max_deaths": int(fields["max_deaths"]),
            "lease_s": int(fields["lease_ms"]) / 1000,
            "audit_groups": int(fields["audit"]),
            "max_uncheckpointed_steps": int(fields["max_uncheckpointed"]),
            **{name: fields[name] for name in _TEXT_RULES},
        }
    )


def pairs(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The (name, value) pairs of a hash in a function's reply."""
    return zip(flat[::2], flat[1::2], strict=True)
