"""Evaluations: groups that measure one version of the weights and are never trained."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import orjson

from rollq.buffer.calls.batches import Batches
from rollq.buffer.calls.replies.batches import BatchState
from rollq.buffer.common.means import present
from rollq.buffer.common.portions import slices
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.curves import as_number
from rollq.buffer.values.rollouts import SampleStatus
from rollq.buffer.values.sample_numbers import Numbers
from rollq.buffer.wire.prompts import decode_prompt
from rollq.buffer.wire.sample_rows import SampleRows

BatchType = Literal["train", "eval"]
GROUPS_PER_TRIP = 500
SOURCE_FIELD = "data_source"
"""The column that names a row's data set. If the first row lacks this column, no other row is searched for it."""


class EvaluatedGroup(NamedTuple):
    """The result of one evaluation prompt.

    `reward` is the mean over the judged samples, None while the group is unfinished or when it `failed`. `samples`
    counts the completed samples, and `tokens` their response tokens. `numbers` holds per-sample numbers (see
    `rollq.buffer.values.sample_numbers`), and `rewards` the judged samples' rewards. `source` is the `data_source` in
    the prompt's metadata, None without one.
    """

    reward: float | None
    tokens: int
    samples: int
    failed: bool
    numbers: Numbers = MappingProxyType({})
    rewards: tuple[float, ...] = ()
    source: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationState:
    """A task's running evaluation, or else its last evaluation.

    Of its `prompts`, `finished` are finished; `failed` of these have no result. `version` and `reward` are the weights
    version and the mean reward of the last evaluation that ended with a result; None before the first such evaluation.
    """

    is_running: bool
    prompts: int
    finished: int
    failed: int
    version: int | None = None
    reward: float | None = None


class Evaluations(Batches):
    """Calls of trainers and coordinators that open, read and close batches of groups."""

    def open_batch(self, task: str, batch_id: str, kind: BatchType, *, step: int, digest: str = "") -> BatchState:
        """Open a batch, or return the open one with this id and the same `digest` of its content.

        An evaluation measures the live version, and needs a task of kind eval. Raises `BatchRefused`, and `ConfigError`
        for an offline task.
        """
        self._check_is_sampled(task)
        handle, _ = self.call_task(
            "open_batch", task, batch_id, f"{batch_id}-{secrets.token_hex(8)}", kind, step, digest
        )
        return self.batch_by_handle(task, handle.decode())

    def evaluated(self, task: str, handle: str) -> list[EvaluatedGroup]:
        """The results of an open evaluation so far, in prompt order. Reads no payload."""
        keys = task_keys(self.run, task)
        ids = self.send("LRANGE", keys.batch_groups(handle), 0, -1)
        first = self.send("HGET", keys.group(int(ids[0])), "prompt") if ids else None
        sourced = ("prompt",) if first and _source(first) is not None else ()  # prompts may be large
        groups: list[EvaluatedGroup] = []
        for trip in slices(ids, GROUPS_PER_TRIP):
            commands = [
                ("HMGET", keys.group(int(group_id)), "status", "reward", "tokens", "letters", "rows", *sourced)
                for group_id in trip
            ]
            groups += [_evaluated(*fields) for fields in self.send_all(commands)]
        return groups

    def close_evaluation(self, task: str, handle: str, result: bytes = b"{}") -> bytes:
        """End an evaluation: its groups leave the buffer, counted as evaluated or cancelled; `result` is kept.

        Harmless to repeat: returns the first caller's result.
        """
        more = 1
        while more:
            more, stored = self.call_task("close_evaluation", task, handle, GROUPS_PER_TRIP, result)
        return bytes(stored)


def _evaluated(
    status: bytes | None,
    reward: bytes | None,
    tokens: bytes | None,
    letters: bytes | None,
    rows: bytes | None,
    prompt: bytes | None = None,
) -> EvaluatedGroup:
    source = _source(prompt) if prompt else None
    if status != b"gathered":
        return EvaluatedGroup(None, 0, 0, failed=status not in (b"pending", b"running"), source=source)
    decoded = SampleRows.decode(rows) if rows else _NO_ROWS
    return EvaluatedGroup(
        float(reward or 0),
        int(tokens or 0),
        (letters or b"").count(SampleStatus.COMPLETED.value.encode()),
        failed=False,
        numbers=decoded.numbers,
        rewards=tuple(present(decoded.rewards)),
        source=source,
    )


_NO_ROWS = SampleRows((), (), {}, ())


def _source(prompt: bytes) -> str | None:
    source = decode_prompt(prompt).metadata.get(SOURCE_FIELD)
    return source if isinstance(source, str) and source else None


def rewards_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Each evaluation's reward, by evaluation name, from metrics of `evaluation_metrics`."""
    rewards = {}
    for name, value in metrics.items():
        kind, _, rest = name.partition("/")
        evaluation, _, metric = rest.partition("/")
        if kind == "eval" and metric == "reward" and (number := as_number(value)) is not None:
            rewards[evaluation] = number
    return rewards


def evaluation_state(batches: Sequence[Mapping[str, bytes | None]], over: int) -> EvaluationState | None:
    """The state of the running evaluation, else of the last one; None without an evaluation.

    `batches` holds the fields of each batch: first the `over` ended batches, oldest first, then all batches.
    """
    ended = _evaluations_among(batches[:over])
    running = [batch for batch in _evaluations_among(batches[over:]) if batch["state"] == b"running"]
    if not ended and not running:
        return None
    shown = (running or ended)[-1]
    size, gathered, failed = (int(shown[name] or 0) for name in ("size", "gathered", "failed"))
    version, reward = _last_result(ended)
    return EvaluationState(bool(running), size, gathered + failed, failed, version, reward)


def _evaluations_among(batches: Sequence[Mapping[str, bytes | None]]) -> list[Mapping[str, bytes | None]]:
    return [batch for batch in batches if batch["type"] == b"eval"]


def _last_result(ended: Sequence[Mapping[str, bytes | None]]) -> tuple[int, float] | tuple[None, None]:
    """The version and the mean reward of the last evaluation with a result."""
    for batch in reversed(ended):
        if (reward := _reward(batch["result"] or b"{}")) is not None:
            return int(batch["version"] or 0), reward
    return None, None


def _reward(result: bytes) -> float | None:
    """The mean reward in an evaluation's result; None without one."""
    found = orjson.loads(result)
    metrics = found.get("metrics") if isinstance(found, dict) else None
    return next(iter(rewards_of(metrics or {}).values()), None)
