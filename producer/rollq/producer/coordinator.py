"""The batch coordinator: submits prompts as one batch, and finalizes their groups as one batch.

It is for training loops that choose the prompts of each step, instead of letting producers run ahead. All state is in
Redis: any process may submit, wait, finalize or abort, and a restarted process finds its batches unchanged. Groups of a
batch are gathered, and become trainable only when the batch is finalized.
"""

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from rq import Queue

from rollq.buffer.calls.batches import MAX_FILL
from rollq.buffer.calls.evaluation_metrics import evaluation_metrics
from rollq.buffer.calls.evaluations import BatchType
from rollq.buffer.calls.replies.batches import BatchState, Finalizing
from rollq.buffer.common.user_functions import OPERATOR, check_function
from rollq.buffer.errors import BatchOver, BatchRefused, ClaimTimeout, ConfigError, StoreLost, UnknownBatch
from rollq.buffer.roles import CoordinatorBuffer
from rollq.buffer.rules.settings import MAX_BATCH_GROUPS
from rollq.buffer.rules.shards import shards_among
from rollq.buffer.store.pubsub import EventKind
from rollq.buffer.store.waiter import Waiter
from rollq.buffer.values.rollouts import PipelineOutput, Prompt, Status
from rollq.buffer.values.sample_numbers import means, sample_numbers, together
from rollq.buffer.wire.prompts import encode_prompt
from rollq.producer.batches import BatchHandle, BatchResult, OverRollout, Stage
from rollq.producer.pipeline import Operator, ScoredGroup, run_pipeline

log = logging.getLogger(__name__)

BATCH_ID = re.compile(r"[A-Za-z0-9_./-]{1,64}")
OF_A_BATCH = (EventKind.ADMIT, EventKind.BATCH, EventKind.PUT)
"""The events of a running batch."""
CUT_OFF_S = 5.0
"""How long workers may take to finish their part of a batch. Later results are not part of it."""
CUT_OFF_PAUSE_S = 0.1
"""The shortest pause between two checks. Each check reads every group of the batch."""
PIPELINE_S = 600.0
"""How long a process may take to finalize a batch before another process may do it."""


class BatchCoordinator:
    """Submits, finalizes and aborts the batches of one trained task and of evaluation tasks."""

    def __init__(
        self,
        buffer: CoordinatorBuffer,
        queue: Queue,
        *,
        pipeline: Sequence[Operator] = (),
        over_rollout: OverRollout | None = None,
        groups_per_job: int = 1,
    ) -> None:
        """`pipeline` lists the operators that finished groups pass before training (see `rollq.producer.pipeline`).

        Raises `ConfigError` for an operator that cannot be called with groups, or for an async operator.
        """
        for operator in pipeline:
            check_function(operator, OPERATOR)
        self._buffer = buffer
        self._queue = queue
        self._pipeline = tuple(pipeline)
        self._over_rollout = over_rollout or OverRollout()
        self._groups_per_job = groups_per_job

    def submit(
        self, task: str, batch_id: str, prompts: Sequence[Prompt], *, batch_type: BatchType = "train", step: int
    ) -> BatchHandle:
        """Schedule `prompts` as one batch for `step`, and return at once.

        While a batch is running, submitting the same content under its id again returns the same handle; the id of a
        finished batch may be reused. Raises `BatchRefused`, a `ValueError`, for different content under a running
        batch's id, for an invalid id or type, and for more than `MAX_BATCH_GROUPS` prompts; `ConfigError` for a task
        with shards.
        """
        _check_submission(batch_id, batch_type, len(prompts))
        state = self._open(task, batch_id, batch_type, step=step, digest=_digest(prompts, batch_type, step))
        size = state.size
        while not state.closed:
            chunk = prompts[size : size + MAX_FILL]
            size = self._buffer.fill_batch(task, state.handle, size, chunk, last=size + len(chunk) >= len(prompts))
            state = self._buffer.batch_by_handle(task, state.handle)
        self._tend(task)
        return BatchHandle(task, batch_id, state.handle)

    def _open(self, task: str, batch_id: str, batch_type: BatchType, *, step: int, digest: str) -> BatchState:
        try:
            return self._buffer.open_batch(task, batch_id, batch_type, step=step, digest=digest)
        except StoreLost as error:
            if set(shards_among(self._buffer.tasks(), task)) - {task}:
                raise ConfigError(
                    f"task {task!r} has shards, and a coordinator's batch is in one task of the buffer: leave "
                    f"tasks.{task}.batches.shards out in a new run"
                ) from error
            raise

    def stage(self, task: str, batch: BatchHandle | str) -> Stage:
        """Return the state of a batch. Raises `UnknownBatch`, a `KeyError`, for an id that was never submitted."""
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
        """Wait for a batch, run the pipeline on its finished groups, and release them for training. Idempotent.

        Waits for `min_wait_num` groups (the rest then joins the pool of interrupted groups), by default for the
        over-rollout's number or, without an over-rollout, for all. The over-rollout also decides whether groups with
        only some finished samples count. An evaluation yields no groups to train and tolerates a timeout. Its metrics
        are `eval/<name>/...`, where the name is the part of the batch's id after the first slash, or else the whole id;
        `detailed` adds the metrics that `evaluation_metrics` describes.

        Raises `ClaimTimeout`, a `TimeoutError`, after `timeout_s`; `BatchRefused`, a `ValueError`, for a batch of a
        different type; `UnknownBatch`, a `KeyError`; and any error of a pipeline operator, after which the batch is
        running again with all its results.
        """
        state = self._state(task, batch)
        if state.kind != batch_type:
            raise BatchRefused(f"batch {state.batch_id!r} is of type {state.kind!r}, not {batch_type!r}")
        if min_wait_num is not None and min_wait_num > state.size:
            log.warning(
                "batch %s: min_wait_num = %d exceeds its %d groups; using %d",
                state.batch_id, min_wait_num, state.size, state.size,
            )  # fmt: skip
            min_wait_num = state.size
        deadline_s = time.monotonic() + timeout_s
        state, enough = self._wait(task, state, timeout_s, min_wait_num)
        if self._over_rollout.partial_groups and (enough or batch_type == "eval"):
            state = self._cut_off(task, state)
        if batch_type == "eval":
            return self._end_evaluation(task, state, detailed)
        if not enough and state.state == "running":
            raise ClaimTimeout(
                f"{_progress(state)} after {timeout_s:g} s; wait longer, or set min_wait_num to how many are enough"
            )
        return self._end(task, state, deadline_s - time.monotonic())

    def abort(self, task: str, batch: BatchHandle | str, reason: str, *, keep_partial_results: bool = False) -> None:
        """End a batch, drop its unfinished groups, and drop its finished groups unless they are kept for training.

        Has no effect if the batch is unknown or has ended.
        """
        try:
            state = self._state(task, batch)
        except UnknownBatch:
            return
        dropped = self._buffer.abort_batch(task, state.handle, reason, keep_finished=keep_partial_results)
        log.info("batch %s aborted, %d groups dropped: %s", state.batch_id, dropped, reason)

    def _state(self, task: str, batch: BatchHandle | str) -> BatchState:
        if isinstance(batch, str):
            state = self._buffer.batch(task, batch)
            if state is None:
                raise UnknownBatch(f"batch {batch!r} of task {task!r} was never submitted, or ended long ago")
            return state
        try:
            return self._buffer.batch_by_handle(task, batch.handle)
        except BatchOver as error:
            raise UnknownBatch(
                f"batch {batch.batch_id!r} of task {task!r} was never submitted, or ended long ago"
            ) from error

    def _tend(self, task: str) -> None:
        """Do a producer's work for the task: take back dead workers' groups, remove dropped payloads, and give each
        pending group a ticket."""
        buffer = self._buffer
        buffer.reap(task)
        buffer.collect(task)
        pending = sum(buffer.counts(name).statuses[Status.PENDING] for name in buffer.tasks())
        buffer.enqueue_missing_tickets(self._queue, pending, self._groups_per_job)

    def _wait(
        self, task: str, state: BatchState, timeout_s: float, min_wait_num: int | None
    ) -> tuple[BatchState, bool]:
        """Wait until the batch is complete, over, or has enough finished groups. Returns the batch's state, and whether
        it has enough."""
        enough = False
        with self._buffer.events(*OF_A_BATCH, task=task) as events:
            waiter = Waiter(events, timeout_s=timeout_s, explain=lambda: _progress(state))
            for _ in waiter:
                state = self._buffer.batch_by_handle(task, state.handle)
                if state.complete or state.state != "running":
                    return state, True
                least, grace_s = self._least_to_wait_for(state.size, min_wait_num)
                if not enough and state.closed and _finished(state) >= least:
                    enough = True
                    waiter.end_within(grace_s)
                self._tend(task)
        return state, enough

    def _cut_off(self, task: str, state: BatchState) -> BatchState:
        """Make workers end their part of a batch, and wait for them. Returns the batch's state."""
        if state.complete or state.state != "running":
            return state
        with self._buffer.events(*OF_A_BATCH, task=task) as events:
            for _ in Waiter(events, timeout_s=CUT_OFF_S, explain=lambda: _progress(state)):
                if not self._buffer.cut_off(task, state.handle):
                    break
                time.sleep(CUT_OFF_PAUSE_S)
        return self._buffer.batch_by_handle(task, state.handle)

    def _least_to_wait_for(self, size: int, min_wait_num: int | None) -> tuple[int, float]:
        """How many finished groups are enough, and how many seconds to wait for the others after that."""
        if min_wait_num is not None:
            return max(min_wait_num, 1), 0.0
        return max(self._over_rollout.enough(size), 1), self._over_rollout.grace_s

    def _end(self, task: str, state: BatchState, timeout_s: float) -> BatchResult:
        """Finalize the batch, or return the result if another process has finalized it. Raises `BatchOver` for an
        aborted batch."""
        nonce = secrets.token_hex(8)
        claimed = self._begin_finalize(task, state, nonce, timeout_s)
        if claimed.state == "finalized":
            return _result(claimed.result)
        try:
            state = self._buffer.batch_by_handle(task, state.handle)
            scored, own = run_pipeline(self._pipeline, self._buffer.fetch(claimed.groups))
        except BaseException:
            self._buffer.undo_finalize(task, state.handle, nonce)
            raise
        if state.size and state.failed == state.size:
            log.error("batch %s: all %d groups failed%s", state.batch_id, state.size, self._last_error(task))
        result = {
            "batch_id": state.batch_id,
            "batch_type": "train",
            "finished_task_count": len(scored) + state.filtered + state.failed,
            "metrics": _metrics(scored, state) | {f"experience_pipeline/{name}": value for name, value in own.items()},
        }
        outputs = {group.group.group_id: _pipeline_output(group) for group in scored}
        ended = self._buffer.end_finalize(task, state.handle, nonce, orjson.dumps(result), outputs)
        if ended.state != "finalized":
            raise BatchOver(f"batch {state.batch_id!r} is {ended.state}: {ended.result.decode()}")
        return _result(ended.result)

    def _last_error(self, task: str) -> str:
        error = self._buffer.counts(task).last_error
        return f"; the last error: {error.text}" if error else ""

    def _begin_finalize(self, task: str, state: BatchState, nonce: str, timeout_s: float) -> Finalizing:
        """Claim the batch for the pipeline, or wait for the process that has claimed it. Returns a finalized or claimed
        batch."""
        busy = f"batch {state.batch_id!r}: another process is still finalizing it"
        with self._buffer.events(EventKind.BATCH, task=task) as events:
            for _ in Waiter(events, timeout_s=timeout_s, explain=lambda: busy):
                claimed = self._buffer.begin_finalize(task, state.handle, nonce, lease_s=PIPELINE_S)
                if claimed.state in ("finalized", "finalizing"):
                    return claimed
                if claimed.state != "busy":
                    raise BatchOver(f"batch {state.batch_id!r} is {claimed.state}: {claimed.result.decode()}")
        raise ClaimTimeout(busy)

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


def _check_submission(batch_id: str, batch_type: str, size: int) -> None:
    if not BATCH_ID.fullmatch(batch_id):
        raise BatchRefused(f"batch id {batch_id!r}: 1 to 64 characters of A-Z a-z 0-9 _ . - / are allowed")
    if size > MAX_BATCH_GROUPS:
        raise BatchRefused(f"batch {batch_id!r} has {size} prompts; at most {MAX_BATCH_GROUPS} are possible")
    if batch_type not in ("train", "eval"):
        raise BatchRefused(f"batch {batch_id!r}: type {batch_type!r} is neither 'train' nor 'eval'")


def _finished(state: BatchState) -> int:
    return state.gathered + state.filtered + state.failed


def _progress(state: BatchState) -> str:
    return f"batch {state.batch_id!r}: {_finished(state)} of {state.size} groups are finished"


def _digest(prompts: Sequence[Prompt], batch_type: str, step: int) -> str:
    """The digest that identifies the content of a submission."""
    digest = hashlib.sha256(f"{batch_type} {step}".encode())
    for prompt in prompts:
        digest.update(b"\0" + encode_prompt(prompt))
    return digest.hexdigest()


def _pipeline_output(group: ScoredGroup) -> PipelineOutput | str:
    """The rewards and advantages to store for a group, or the reason why it was dropped."""
    if group.dropped is not None:
        return group.dropped
    advantages = None if group.advantages is None else tuple(group.advantages.tolist())
    return PipelineOutput(tuple(group.rewards.tolist()), advantages)


def _metrics(scored: Sequence[ScoredGroup], state: BatchState) -> dict[str, float]:
    rewards = np.concatenate([group.rewards[group.valid] for group in scored]) if scored else np.zeros(0)
    dropped = sum(group.dropped is not None for group in scored)
    counts: dict[str, float] = {
        "groups": len(scored) - dropped,
        "filtered": dropped + state.filtered,
        "failed": state.failed,
        "unfinished": state.size - len(scored) - state.filtered - state.failed,
    }
    numbers = together(sample_numbers(group.group.samples) for group in scored)
    parts = {f"rollout/{name}": value for name, value in means(numbers).items()}
    return counts | ({"reward": float(rewards.mean())} if len(rewards) else {}) | parts


def _result(stored: bytes) -> BatchResult:
    fields: dict[str, Any] = orjson.loads(stored)
    return BatchResult(**fields)
