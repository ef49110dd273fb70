"""The batch coordinator: prompts in as one batch, finished groups out as one batch.

For loops that decide themselves what is sampled for which step, instead of letting producers run ahead. All state is in
Redis: any process may submit, wait, finalize or abort, and one that is killed and started again finds its batches as
they were. Groups of a batch are gathered, and become trainable only when the batch is finalized.
"""

import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import orjson
from rq import Queue

from rollq.buffer.batches import MAX_FILL
from rollq.buffer.errors import BatchOver
from rollq.buffer.evaluations import BatchType, evaluation_metrics
from rollq.buffer.replies import BatchState
from rollq.buffer.roles import CoordinatorBuffer
from rollq.buffer.rollouts import PipelineOutput, Prompt, Status
from rollq.buffer.settings import MAX_BATCH_GROUPS
from rollq.buffer.wire.prompts import encode_prompt
from rollq.producer.pipeline import Operator, ScoredGroup, run_pipeline

log = logging.getLogger(__name__)

BATCH_ID = re.compile(r"[A-Za-z0-9_./-]{1,64}")
POLL_S = 1.0
"""Longest pause between two looks, should a wake-up be lost."""
PIPELINE_S = 600.0
"""A process that has begun to finalize and is silent for so long is taken for dead."""


class Stage(StrEnum):
    """Where a batch is in its life."""

    PENDING = "pending"  # submitted in part: whoever submits it again completes it
    RUNNING = "running"
    FINALIZING = "finalizing"
    FINALIZED = "finalized"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class BatchHandle:
    """One incarnation of a batch: an id that is used again has another handle."""

    task: str
    batch_id: str
    handle: str


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What became of a batch. `finished_task_count`: prompts whose groups were finished when it ended."""

    batch_id: str
    batch_type: BatchType
    finished_task_count: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OverRollout:
    """Ends a batch without its slowest groups: `grace_s` after ceil(size x (1 - `ratio`)) of them are finished."""

    ratio: float = 0.0
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.ratio < 1:
            raise ValueError(f"over-rollout ratio {self.ratio!r}: a share from 0 to below 1 is needed")

    def enough(self, size: int) -> int:
        """Groups that must be finished."""
        return math.ceil(size * (1 - self.ratio))


class BatchCoordinator:
    """Submits and ends batches of one task that is trained, and of tasks that are evaluated."""

    def __init__(
        self,
        buffer: CoordinatorBuffer,
        queue: Queue,
        *,
        pipeline: Sequence[Operator] = (),
        over_rollout: OverRollout | None = None,
        groups_per_job: int = 1,
    ) -> None:
        """`pipeline`: what finished groups go through before they may be trained, see `rollq.producer.pipeline`."""
        self._buffer = buffer
        self._queue = queue
        self._pipeline = tuple(pipeline)
        self._over_rollout = over_rollout or OverRollout()
        self._groups_per_job = groups_per_job

    def submit(
        self, task: str, batch_id: str, prompts: Sequence[Prompt], *, batch_type: BatchType = "train", step: int
    ) -> BatchHandle:
        """Have `prompts` sampled for `step`, as one batch. Returns at once.

        The same id with the same content returns the same handle while the batch is under way; a finished id may be
        used again. Raises `ValueError` for other content under an id that is under way, for an id or a type that cannot
        be, and for more prompts than a batch may hold.
        """
        if not BATCH_ID.fullmatch(batch_id):
            raise ValueError(f"batch id {batch_id!r}: 1 to 64 characters of A-Z a-z 0-9 _ . - / are allowed")
        if len(prompts) > MAX_BATCH_GROUPS:
            raise ValueError(f"batch {batch_id!r} has {len(prompts)} prompts; at most {MAX_BATCH_GROUPS} are possible")
        if batch_type not in ("train", "eval"):
            raise ValueError(f"batch {batch_id!r}: type {batch_type!r} is neither 'train' nor 'eval'")
        state = self._buffer.open_batch(
            task, batch_id, batch_type, step=step, digest=_digest(prompts, batch_type, step)
        )
        size = state.size
        while not state.closed:
            chunk = prompts[size : size + MAX_FILL]
            size = self._buffer.fill_batch(task, state.handle, size, chunk, last=size + len(chunk) >= len(prompts))
            state = self._buffer.batch_by_handle(task, state.handle)
        self._tend(task)
        return BatchHandle(task, batch_id, state.handle)

    def stage(self, task: str, batch: BatchHandle | str) -> Stage:
        """Where a batch is. Raises `KeyError` for an id that never was."""
        state = self._state(task, batch)
        return Stage(state.state) if state.closed or state.state != "running" else Stage.PENDING

    def finalize(
        self,
        task: str,
        batch: BatchHandle | str,
        *,
        timeout_s: float,
        batch_type: BatchType = "train",
        min_wait_num: int | None = None,
        detailed: bool = False,
    ) -> BatchResult:
        """Wait for a batch, run the pipeline on what is finished, and let it be trained. Harmless to repeat.

        Waits for all groups, or for `min_wait_num` of them (then the rest joins the pool of interrupted groups), by
        default for those that the over-rollout wants. An evaluation writes nothing for training and tolerates a
        timeout: its metrics are `eval/<name>/...`, with the part of the id after its first slash as name; `detailed`
        adds min, max and std.

        Raises `TimeoutError`, `ValueError` for a batch of another type, `KeyError` for an id that never was, and what
        an operator of the pipeline raises: then the batch is running again with every result still there.
        """
        state = self._state(task, batch)
        if state.kind != batch_type:
            raise ValueError(f"batch {state.batch_id!r} is of type {state.kind!r}, not {batch_type!r}")
        if min_wait_num is not None and min_wait_num > state.size:
            log.warning(
                "batch %s: min_wait_num = %d is more than its %d groups, which is what counts",
                state.batch_id, min_wait_num, state.size,
            )  # fmt: skip
            min_wait_num = state.size
        deadline_s = time.monotonic() + timeout_s
        state, enough = self._wait(task, state, deadline_s, min_wait_num)
        if batch_type == "eval":
            return self._end_evaluation(task, state, detailed)
        if not enough and state.state == "running":
            raise TimeoutError(
                f"batch {state.batch_id!r}: {_finished(state)} of {state.size} groups are finished after "
                f"{timeout_s:g} s; wait longer, or say with min_wait_num how many are enough"
            )
        return self._end(task, state, deadline_s)

    def abort(self, task: str, batch: BatchHandle | str, reason: str, *, keep_partial_results: bool = False) -> None:
        """End a batch: what is queued or under way is dropped; finished groups too, unless they are kept to be trained.

        Does nothing to a batch that is unknown or over.
        """
        try:
            state = self._state(task, batch)
        except KeyError:
            return
        dropped = self._buffer.abort_batch(task, state.handle, reason, keep_finished=keep_partial_results)
        log.info("batch %s aborted, %d groups dropped: %s", state.batch_id, dropped, reason)

    def _state(self, task: str, batch: BatchHandle | str) -> BatchState:
        if isinstance(batch, BatchHandle):
            try:
                return self._buffer.batch_by_handle(task, batch.handle)
            except BatchOver as error:
                raise KeyError(
                    f"batch {batch.batch_id!r} of task {task!r} was never submitted, or is long over"
                ) from error
        found = self._buffer.batch(task, batch)
        if found is None:
            raise KeyError(f"batch {batch!r} of task {task!r} was never submitted, or is long over")
        return found

    def _tend(self, task: str) -> None:
        """What a producer does for its groups: take those of dead workers back, and see that each has a ticket."""
        buffer = self._buffer
        buffer.reap(task)
        pending = sum(buffer.counts(name).statuses[Status.PENDING] for name in buffer.tasks())
        buffer.enqueue_missing_tickets(self._queue, pending, self._groups_per_job)

    def _wait(
        self, task: str, state: BatchState, deadline_s: float, min_wait_num: int | None
    ) -> tuple[BatchState, bool]:
        """Wait until the batch is complete, over, or enough of it is finished; its state then, and whether it is."""
        grace_s = 0.0 if min_wait_num is not None else self._over_rollout.grace_s
        cut_s = math.inf
        with self._buffer.events() as events:
            while True:
                state = self._buffer.batch_by_handle(task, state.handle)
                if state.complete or state.state != "running":
                    return state, True
                least = self._over_rollout.enough(state.size) if min_wait_num is None else min_wait_num
                now_s = time.monotonic()
                if least < state.size and state.closed and _finished(state) >= max(least, 1):
                    cut_s = min(cut_s, now_s + grace_s)
                if now_s >= min(deadline_s, cut_s):
                    return state, cut_s < math.inf
                self._tend(task)
                events.wait(min(POLL_S, min(deadline_s, cut_s) - now_s))

    def _end(self, task: str, state: BatchState, deadline_s: float) -> BatchResult:
        nonce = secrets.token_hex(8)
        with self._buffer.events() as events:
            while True:
                taken = self._buffer.begin_finalize(task, state.handle, nonce, lease_s=PIPELINE_S)
                if taken.state == "finalized":
                    return _result(taken.result)
                if taken.state == "finalizing":
                    break
                if taken.state != "busy":
                    raise BatchOver(f"batch {state.batch_id!r} is {taken.state}: {taken.result.decode()}")
                if time.monotonic() >= deadline_s:
                    raise TimeoutError(f"batch {state.batch_id!r}: another process is still finalizing it")
                events.wait(POLL_S)
        try:
            state = self._buffer.batch_by_handle(task, state.handle)
            scored = run_pipeline(self._pipeline, self._buffer.fetch(taken.groups))
        except BaseException:
            self._buffer.undo_finalize(task, state.handle, nonce)
            raise
        shaped = {one.group.group_id: _shaped(one) for one in scored}
        result = {
            "batch_id": state.batch_id,
            "batch_type": "train",
            "finished_task_count": len(scored) + state.filtered + state.failed,
            "metrics": _metrics(scored, state),
        }
        ended = self._buffer.end_finalize(task, state.handle, nonce, orjson.dumps(result), shaped)
        if ended.state != "finalized":
            raise BatchOver(f"batch {state.batch_id!r} is {ended.state}: {ended.result.decode()}")
        return _result(ended.result)

    def _end_evaluation(self, task: str, state: BatchState, detailed: bool) -> BatchResult:
        name = state.batch_id.partition("/")[2] or state.batch_id
        groups = self._buffer.evaluated(task, state.handle)
        result = {
            "batch_id": state.batch_id,
            "batch_type": "eval",
            "finished_task_count": sum(group.reward is not None or group.failed for group in groups),
            "metrics": evaluation_metrics(name, groups, detailed=detailed),
        }
        return _result(self._buffer.close_evaluation(task, state.handle, orjson.dumps(result)))


def _finished(state: BatchState) -> int:
    return state.gathered + state.filtered + state.failed


def _digest(prompts: Sequence[Prompt], batch_type: str, step: int) -> str:
    """What makes two submissions the same."""
    digest = hashlib.sha256(f"{batch_type} {step}".encode())
    for prompt in prompts:
        digest.update(b"\0" + encode_prompt(prompt))
    return digest.hexdigest()


def _shaped(one: ScoredGroup) -> PipelineOutput | str:
    if one.dropped is not None:
        return one.dropped
    given = None if one.advantages is None else tuple(float(number) for number in one.advantages)
    return PipelineOutput(tuple(float(reward) for reward in one.rewards), given)


def _metrics(scored: Sequence[ScoredGroup], state: BatchState) -> dict[str, float]:
    rewards = np.concatenate([one.rewards[one.valid] for one in scored]) if scored else np.zeros(0)
    dropped = sum(one.dropped is not None for one in scored)
    found: dict[str, float] = {"groups": len(scored) - dropped, "filtered": dropped + state.filtered}
    found |= {"failed": state.failed, "unfinished": state.size - len(scored) - state.filtered - state.failed}
    return found | ({"reward": float(rewards.mean())} if len(rewards) else {})


def _result(stored: bytes) -> BatchResult:
    fields: dict[str, Any] = orjson.loads(stored)
    return BatchResult(**fields)
