"""`Consumer`: a trainer's place in a run. It takes each step's batch, hands out weights, and commits what was trained.

Invariant: the step moves only by `commit`, so asking again for a step, after whatever failure, gives the same batch.
Safety rests on the epoch that `connect` begins; the thread that renews the trainer's lease only keeps others polite.
"""

import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollq.buffer.batch_sizes import groups_at
from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import (
    ClaimTimeout,
    ConfigError,
    CorruptGroup,
    ProductionStalled,
    ProductionStopped,
    RollqError,
    ServerError,
    SyncFirst,
)
from rollq.buffer.replies import Claimed, Production, Shortfall, TrainerEpoch
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.rollouts import Group
from rollq.buffer.store.connection import Patience
from rollq.buffer.training import TRAINER_LEASE_S, ReleaseMode
from rollq.consumer.batch import Batch
from rollq.consumer.batch_wait import Outlook, explain_wait, outlook
from rollq.consumer.evaluation import evaluate
from rollq.consumer.settings import ConsumerSettings
from rollq.consumer.weights.publisher import WeightPublisher, make_sender

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Longest pause between two looks at the buffer, should a wake-up be lost."""
RENEW_S = TRAINER_LEASE_S / 3
TOLD_EVERY_S = 30.0
"""A wait that is longer than this is explained, again and again."""


class Consumer:
    """Iterate over it for batches; see `connect`. Every method is called alike on every rank.

    Only rank 0 publishes, commits, checkpoints and releases; there these calls must come after a barrier of the ranks
    that train, on the others they only move the step.
    """

    def __init__(
        self,
        buffer: TrainerBuffer,
        held: TrainerEpoch,
        sizes: Mapping[str, int],
        settings: ConsumerSettings,
        outlet: WeightPublisher,
    ) -> None:
        """Use `connect`. Takes over `buffer` and closes it."""
        self._buffer = buffer
        self._held = held
        self._given_sizes = dict(sizes)
        self._rules = {task: buffer.rules(task) for task in buffer.train_tasks()}
        self._settings = settings
        self._stop = buffer.closed
        self._step = held.from_step + 1
        self._taken = held.from_step  # the step of the last batch that was handed out
        self._outlet = outlet
        self._events = buffer.events()
        self._closing = threading.Event()
        self._fenced: RollqError | None = None
        self._renewal = threading.Thread(target=self._renew, name="rollq-trainer-lease", daemon=True)

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        run: str,
        weights: Path | Mapping[str, Any],
        batch: Mapping[str, int] | None = None,
        resume_from: int = 0,
        settings: ConsumerSettings | None = None,
        password: str | None = None,
        stop: threading.Event | None = None,
    ) -> Self:
        """Take the run `run` as its trainer, standing at step `resume_from` (0: nothing trained yet).

        `weights` are those of that step, a folder with model.safetensors or a state dict: workers get them at once.
        `batch`: groups per task in a batch; default: what each task's rules say for the step. Setting `stop` ends the
        iteration, also while the server is away; leaving the consumer sets it.

        Raises `TrainerHeld` while another trainer lives, `HistoryGone` when `resume_from` is too old, `StoreLost`,
        `ServerUnavailable`, `ServerRefused`, `ConfigError`, `WeightsError`.
        """
        settings = settings or ConsumerSettings()
        stop = stop or threading.Event()
        buffer = Buffer.connect(url, run, password=password, patience=Patience(closed=stop))
        try:
            sizes = batch_sizes(buffer, batch)
            outlet = WeightPublisher(
                buffer,
                settings.transport,
                settings.weights_dir,
                settings.keep_versions,
                writes=settings.rank == 0,
                sender=make_sender(buffer, settings),
            )
            stored = outlet.put(weights)
            held = buffer.begin_epoch(
                trainer_id=settings.trainer_id,
                launch_id=settings.launch_id or secrets.token_hex(8),
                from_step=resume_from,
                mode=settings.mode,
                uri=stored.uri,
                digest=stored.digest,
                takeover=settings.takeover,
            )
            if held.from_step != resume_from:
                raise ConfigError(
                    f"launch_id {held.launch_id!r} has begun at step {held.from_step}, not at {resume_from}: "
                    "a new launch needs a new launch_id"
                )
            return cls(buffer, held, sizes, settings, outlet)
        except BaseException:
            buffer.close()
            raise

    def __enter__(self) -> Self:
        self._events.__enter__()
        if self._settings.rank == 0:
            self._renewal.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._events.__exit__(kind, error, trace)
        self._buffer.close()
        if self._renewal.is_alive():
            self._renewal.join(timeout=5)

    @property
    def epoch(self) -> int:
        """The epoch that this trainer began."""
        return self._held.epoch

    @property
    def step(self) -> int:
        """The step that is trained next."""
        return self._step

    @property
    def sync_weights_interval(self) -> int:
        """Steps between two publications of weights; the smallest of the tasks'."""
        return min(self._rules[task].sync_weights_interval for task in self._sizes())

    def _sizes(self) -> dict[str, int]:
        """Groups per task in the batch of the current step: those given, else what the tasks' rules say."""
        if self._given_sizes:
            return self._given_sizes
        return {task: groups_at(rule.batch_groups, rule.schedule, self._step) for task, rule in self._rules.items()}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Wait for the batch of the current step; this rank's share of it is what its micro-batches hold.

        A batch with a group that cannot be read is replaced by another; the group is quarantined.
        The iteration ends when told to stop, and when a task's own hook has ended production and no batch fills any
        more. Raises `SyncFirst` when the live weights are too old for the step and newer ones are not published yet,
        `ProductionStalled` and `ProductionStopped` when no batch can ever fill, `ClaimTimeout` saying what holds it
        back, `FencedError`, `CheckpointOverdue`, `StoreLost`. None of these moves the step.
        """
        while (claimed := self._claim()) is not None:
            if self._settings.colocated and self._settings.rank == 0 and not self._engines_sleep(claimed.step):
                break
            try:
                groups = self._buffer.fetch(claimed.groups)
            except CorruptGroup as error:
                self._replace(claimed.step, error)
            else:
                return self._batch(claimed, groups)
        raise StopIteration

    def _replace(self, step: int, error: CorruptGroup) -> None:
        """Every rank meets the same bytes: rank 0 gives the batch up, and the others wait until it has."""
        log.error("step %d: %s; the group is quarantined, and the step gets another batch", step, error)
        if self._settings.rank == 0:
            self._checked().release(self._held, step, "return", bad={error.task: [error.group_id]})
            self._wake_engines()
        else:
            self._events.wait(POLL_S)

    def _batch(self, claimed: Claimed, groups: Sequence[Group]) -> Batch:
        self._taken = claimed.step
        return Batch.build(
            claimed.step,
            groups,
            floors=claimed.floors,
            token_thresholds={group.task: self._rules[group.task].token_threshold for group in groups},
            settings=self._settings.advantages,
            rank=self._settings.rank,
            world_size=self._settings.world_size,
        )

    def publish(self, weights: Path | Mapping[str, Any]) -> None:
        """Give workers new weights, a folder with model.safetensors or a state dict: groups too old expire at once.

        Their version is the step of the last batch that was taken. By transport `nccl` it returns when the workers have
        them; one that has failed gets them later. Raises `WeightsError`, `FencedError`.
        """
        if self._settings.rank == 0:
            stored = self._outlet.announce(weights, self._taken)
            self._checked().publish(self._held, self._taken, uri=stored.uri, digest=stored.digest)
            self._outlet.send()
            self._wake_engines()

    def commit(self, batch: Batch) -> None:
        """The batch has been trained: the next one is of the step after it. Raises `FencedError`."""
        if self._settings.rank == 0:
            self._checked().commit(self._held, batch.step)
        self._step = batch.step + 1

    def checkpoint(self, step: int) -> None:
        """A checkpoint on disk covers `step`: batches up to it are not asked for again, and leave the buffer."""
        if self._settings.rank == 0:
            self._checked().checkpoint(self._held, step)

    def release(self, batch: Batch, mode: ReleaseMode) -> None:
        """Give a batch up: `return` it, `drop` it, or `quarantine` it for audit. The step then gets another one."""
        if self._settings.rank == 0:
            self._checked().release(self._held, batch.step, mode)
            self._wake_engines()

    def _wake_engines(self) -> None:
        """Let engines that were put to sleep go on; a task that was paused, or had ended, is so again."""
        if self._settings.colocated:
            self._checked().sleep(self._held, "")

    def _engines_sleep(self, step: int) -> bool:
        """Have every engine give its memory away, and wait until all have; False when told to stop meanwhile."""
        # the time tells this sleep from an earlier one for the same step
        why = f"step {step} is being trained, since {datetime.now(UTC).isoformat(timespec='microseconds')}"
        self._checked().sleep(self._held, why)
        told_s = time.monotonic()
        while not self._stop.is_set():
            awake = [name for name, report in self._checked().workers().items() if report.get("asleep_for") != why]
            if not awake:
                return True
            if time.monotonic() - told_s >= TOLD_EVERY_S:
                told_s = time.monotonic()
                log.warning("step %d waits for engines to sleep: %s", step, ", ".join(awake))
            self._events.wait(POLL_S)
        return False

    def _claim(self) -> Claimed | None:
        """The current step's batch; None when told to stop."""
        started_s = told_s = time.monotonic()
        timeout_s = self._settings.timeout_s
        sizes = self._sizes()
        while not self._stop.is_set():
            try:
                outcome = self._checked().claim(self._held, self._step, sizes)
                if not isinstance(outcome, Claimed) and (end := self._outlook(outcome)) is not Outlook.WAIT:
                    # the last groups under way may have been filed between the two looks
                    outcome = self._checked().claim(self._held, self._step, sizes)
                    if not isinstance(outcome, Claimed):
                        self._give_up(end, outcome)
                        return None
                if isinstance(outcome, Claimed):
                    return outcome
                self._outlet.serve_late()
            except ServerError:
                if self._stop.is_set():
                    return None
                raise
            now_s = time.monotonic()
            if timeout_s is not None and now_s - started_s >= timeout_s:
                raise ClaimTimeout(self._explain(outcome))
            if now_s - told_s >= TOLD_EVERY_S:
                log.warning("waiting for %.0f s: %s", now_s - started_s, self._explain(outcome))
                told_s = now_s
            left_s = POLL_S if timeout_s is None else timeout_s - (time.monotonic() - started_s)
            self._events.wait(min(POLL_S, max(left_s, 0.0)))
        return None

    def _outlook(self, shortfall: Shortfall) -> Outlook:
        counts = [self._buffer.counts(task) for task in shortfall.wanted]
        return outlook(shortfall, counts, self._buffer.memory_fraction())

    def _give_up(self, end: Outlook, shortfall: Shortfall) -> None:
        """Raise what ends the wait for a batch; nothing when production has ended as its hook wanted."""
        match end:
            case Outlook.SYNC_FIRST:
                raise SyncFirst(
                    f"the live weights are too old for step {shortfall.step}; publish those of step {self._step - 1}, "
                    "then ask for it again"
                )
            case Outlook.STALLED:
                raise ProductionStalled(self._explain(shortfall))
            case Outlook.STOPPED:
                raise ProductionStopped(self._explain(shortfall))
            case _:
                log.info("production has ended: %s", self._explain(shortfall))

    def _explain(self, shortfall: Shortfall) -> str:
        buffer = self._buffer
        counts = [buffer.counts(task) for task in self._sizes()]
        return explain_wait(shortfall, counts, len(buffer.workers()), buffer.memory_fraction())

    def take_production(self) -> dict[str, Production]:
        """What each task produced since the last call; of rank 0, others get {}."""
        if self._settings.rank != 0:
            return {}
        return {task: self._checked().take_production(task) for task in self._rules}

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(
        self, names: Sequence[str] | None = None, *, timeout_s: float | None = None, detailed: bool = False
    ) -> dict[str, float]:
        """Have evaluations (default: all) made by the live weights, and wait for them; returns `eval/<name>/...`.

        Producers ask every prompt of an evaluation, workers put them before the training groups of the next step, and
        nothing of it is ever trained. Publish nothing meanwhile: every token must be of the live version. After
        `timeout_s` the metrics are of what is finished. Only rank 0 evaluates; others get {}.
        See `evaluation_metrics` for what the metrics mean. Raises `ConfigError` for a name that is no evaluation, and
        `FencedError` when another trainer has taken over: its weights are never ours.
        """
        if self._settings.rank != 0:
            return {}
        return evaluate(
            self._checked,
            names,
            timeout_s=timeout_s,
            detailed=detailed,
            events=self._events,
            stop=self._stop,
            meanwhile=self._outlet.serve_late,
        )

    def _checked(self) -> TrainerBuffer:
        """The buffer, unless the renewing thread has learnt that the run is lost to us."""
        if self._fenced is not None:
            raise self._fenced
        return self._buffer

    def _renew(self) -> None:
        while not self._closing.wait(RENEW_S):
            try:
                self._buffer.renew_trainer(self._held)
                self._outlet.keep()
            except ServerError as error:
                if not self._closing.is_set():
                    log.warning("cannot renew the trainer's lease: %s", error)
            except RollqError as error:  # fenced, or the store is lost: final
                self._fenced = error
                return


def batch_sizes(buffer: TrainerBuffer, batch: Mapping[str, int] | None) -> dict[str, int]:
    """Groups per task in a batch, if given; else empty: they follow from the tasks' rules, step by step.

    Raises `ConfigError` for a task that is not there, or for more groups than are produced for a step.
    """
    tasks = buffer.train_tasks()
    if not tasks or set(batch or {}) - set(tasks):
        raise ConfigError(
            f"batch {dict(batch or {})!r}: run {buffer.run!r} has the tasks {tasks!r}; a producer registers them"
        )
    for task, size in (batch or {}).items():
        rules = buffer.rules(task)
        if size > (produced := min(rules.batch_groups, *(groups for _, groups in rules.schedule), rules.batch_groups)):
            raise ConfigError(
                f"task {task!r}: a batch of {size} groups would never fill: batch_groups = {produced} are produced "
                "for each step"
            )
    return dict(batch or {})
