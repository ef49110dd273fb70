"""`Consumer`: a trainer's connection to a run. It takes each step's batch, publishes weights and commits trained steps.

Invariant: only `commit` moves the step, so asking for a step again, after any failure, gives the same batch.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import inf
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from rollq.buffer.calls.claiming import ReleaseMode
from rollq.buffer.calls.evaluation_metrics import MetricFunction
from rollq.buffer.calls.evaluations import rewards_of
from rollq.buffer.calls.replies.tasks import Production
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import ConfigError
from rollq.buffer.roles import TrainerBuffer
from rollq.buffer.tracing.tracer import start_tracer
from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.buffer.weights.probe import Probe
from rollq.consumer.annotations import Annotator
from rollq.consumer.batches.batch import Batch
from rollq.consumer.claims.activity import Activity
from rollq.consumer.claims.batch_taker import BatchTaker
from rollq.consumer.claims.claimer import BatchClaimer, BatchSizes
from rollq.consumer.claims.colocation import ColocatedEngines
from rollq.consumer.claims.connection import Connection
from rollq.consumer.claims.epoch_start import begin_epoch
from rollq.consumer.claims.evaluation import evaluate
from rollq.consumer.claims.group_traces import GroupTraces
from rollq.consumer.claims.prefetch import Prefetch
from rollq.consumer.claims.replay_check import Replay
from rollq.consumer.claims.stream import BatchStream, why_whole
from rollq.consumer.claims.trainer_lease import TrainerLease
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.production import take_production
from rollq.consumer.settings import ConsumerSettings
from rollq.consumer.weights.publisher import WeightPublisher, make_publisher
from rollq.consumer.weights.sources import Weights, gathering

if TYPE_CHECKING:
    from rollq.consumer.batches.micro_batch import MicroBatch


class Consumer(Iterator[Batch]):
    """Iterate over it for batches; open it with `connect` and use it in `with`.

    All ranks of a distributed trainer call the same methods in the same order. Only rank 0 publishes, commits,
    checkpoints and releases; on other ranks these calls only note what rank 0 does. Publish and commit after a barrier
    of the training ranks.
    """

    def __init__(
        self,
        buffer: TrainerBuffer,
        epoch: TrainerEpoch,
        sizes: BatchSizes,
        settings: ConsumerSettings,
        publisher: WeightPublisher,
        annotator: Annotator | None = None,
    ) -> None:
        """Use `connect`. Takes over `buffer` and closes it."""
        self._settings = settings
        self._sizes = sizes
        self._publisher = publisher
        self._annotator = annotator
        self._activity = Activity(epoch.from_step + 1)
        self._lease = TrainerLease(buffer, epoch, publisher.keep, self._activity)
        self._events = buffer.events()
        self._stop = buffer.closed
        claimer = BatchClaimer(
            self._lease,
            sizes,
            self._events,
            self._stop,
            rank=settings.rank,
            world_size=settings.world_size,
            seed=settings.seed,
            timeout_s=settings.timeout_s,
            short=self._activity.lack,
            meanwhile=publisher.serve_late,
        )
        self._engines = ColocatedEngines(
            self._lease, self._events, self._stop, colocated=settings.colocated and settings.rank == 0
        )
        self._prefetch = Prefetch(
            lambda: self._lease.buffer,
            sizes.at,
            limit_bytes=settings.prefetch_bytes,
            rank=settings.rank,
            world_size=settings.world_size,
            seed=settings.seed,
        )
        self._batches = BatchTaker(self._lease, claimer, self._engines, self._prefetch, self._activity, settings)
        tracer = start_tracer("trainer", buffer.run, lambda: buffer.incarnation) if settings.rank == 0 else None
        self._traces = GroupTraces(tracer, lambda: self._lease.buffer)
        self._replay = Replay(self._lease, settings.on_replay_mismatch)
        self._step = epoch.from_step + 1
        self._entered = False

    @classmethod
    def connect(
        cls,
        place: str | Connection,
        *,
        run: str | None = None,
        weights: Weights,
        batch: Mapping[str, int] | None = None,
        resume_from: int = 0,
        lineage: str | None = None,
        probe: Probe | None = None,
        settings: ConsumerSettings | None = None,
        stop: threading.Event | None = None,
    ) -> Self:
        """Take over a run as its trainer, with `resume_from` as the last trained step (0: nothing trained yet).

        `place` is the URL of the server or cluster, and `run` names the run on it. A `Connection` instead of both also
        holds a password, the payloads' location, and the archive for `annotate`. `weights` are the weights of that
        step, in any form that `publish` takes; workers get them at once. `probe` is the weights' probe, as in
        `publish`. `lineage` is the checkpoint's `Consumer.lineage`. It reveals a store that has since been emptied, and
        steps that a rewind has undone. `batch` maps tasks to their number of groups in a batch; by default each task's
        rules decide. Setting `stop` ends the iteration, even during a server outage; leaving the consumer sets it.
        Ranks other than 0 wait here until rank 0 has taken over; of their `weights`, only the shards of a model sharded
        by FSDP are used.

        A trainer that was killed on this machine is replaced at once. A trainer that may still live elsewhere keeps the
        run until its lease of 30 s expires. Leaving the consumer ends its lease.

        Raises `TrainerHeld` while another trainer is alive and `takeover` is not set, `HistoryGone` if the run cannot
        be taken back to `resume_from`, `StoreLost`, `ReplayMismatch`, `ServerUnavailable`, `ServerRefused`,
        `ConfigError`, `WeightsError`. Later calls wait for an unavailable server for up to `max_outage_s`, by default
        without a limit.
        """
        settings = settings or ConsumerSettings()
        stop = stop or threading.Event()
        connection = Connection.to(place, run)
        buffer = connection.buffer(stop)
        buffer.wait_out_outages(inf if settings.max_outage_s is None else settings.max_outage_s)
        try:
            buffer.check_payloads()
            sizes = BatchSizes.from_run(buffer, batch)
            publisher = make_publisher(buffer, settings)
            with gathering(weights, probe, rank=settings.rank, dtype=settings.publish_dtype) as source:
                start = None if source is None else partial(publisher.start, source)
                epoch = begin_epoch(buffer, settings, start, resume_from, lineage)
            names = connection.run, buffer.incarnation, epoch.epoch, settings.rank
            annotator = Annotator(connection.archive, *names) if connection.archive else None
            return cls(buffer, epoch, sizes, settings, publisher, annotator)
        except BaseException:
            buffer.close()
            raise

    def __enter__(self) -> Self:
        self._entered = True
        self._events.__enter__()
        if self._settings.rank == 0:
            self._lease.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._events.__exit__(kind, error, trace)
        self._activity.end(error, stopped=self._stop.is_set())
        self._stop.set()  # ends waits for the server
        self._prefetch.close()
        if self._annotator:
            self._annotator.close()
        self._lease.close()
        self._traces.close()

    @property
    def epoch(self) -> int:
        """The epoch that this trainer started."""
        return self._lease.epoch.epoch

    @property
    def lineage(self) -> str:
        """Identifies the store and the epoch of this trainer's weights. Save it with every checkpoint."""
        return self._lease.buffer.lineage_of(self._lease.epoch)

    @property
    def replayed_through(self) -> int:
        """The last step whose batch is served as it was recorded before this trainer took over."""
        return self._lease.epoch.replayed_through

    @property
    def step(self) -> int:
        """The step to train next."""
        return self._step

    @property
    def sync_weights_interval(self) -> int:
        """Steps between two publications of weights: the smallest interval of the batch's tasks."""
        return min(self._sizes.rules[task].sync_weights_interval for task in self._sizes.at(self._step))

    def __next__(self) -> Batch:
        """Wait for the batch of the current step. Its micro-batches hold this rank's share.

        A step that was neither committed nor released gives the same batch again, with one warning. A batch with an
        unreadable group is replaced, and the group is quarantined. The iteration ends when `stop` is set, and when a
        task's own hook has ended production and no further batch can fill.

        Raises `SyncFirst` if the live weights are too old for the step and newer ones are not published yet,
        `ProductionStalled` or `ProductionStopped` if no batch can ever fill, `ClaimTimeout` with the reason for the
        delay, `FencedError`, `CheckpointOverdue`, `StoreLost`. None of these moves the step. Also raises `ConfigError`
        outside a `with` block, since nothing renews the trainer's lease there.
        """
        self._check_entered()
        batch = self._batches.take(self._step)
        if batch is None:
            raise StopIteration
        return batch

    def stream(
        self, max_tokens: int, *, loss: LossSettings | None = None, padded: bool = False, arrays: Sequence[str] = ()
    ) -> BatchStream:
        """The micro-batches of the current step while its batch fills: see `BatchStream`.

        A synchronous trainer trains on the groups that are finished while the others are made. Groups come in the order
        in which they finish, restricted to groups that the whole batch will certainly contain. `max_tokens`, `padded`
        and `arrays` are as in `Batch.micro_batches`. After the loop, `finish` turns the gradients into the whole
        batch's gradients under `loss`; then update, `publish`, and `commit(stream.batch)`.

        Iterating raises what `next` raises, where `timeout_s` bounds each wait, and `NotClaimed` for a batch that was
        released in between. After an unreadable group the step gets another batch: if a part has already been trained,
        the iteration raises `CorruptGroup`; drop the gradients, and call `stream` again. Raises `ConfigError` for
        settings that need a whole batch: advantages with baseline or scale `batch`, a `loss` with sft or distillation,
        colocated engines; and outside a `with` block.
        """
        self._check_entered()
        loss = loss or LossSettings()
        if why := why_whole(self._settings, loss):
            raise ConfigError(why)

        def micro_batches(part: Batch) -> "Sequence[MicroBatch]":
            return part.micro_batches(max_tokens, padded=padded, arrays=arrays, whole_samples=loss.needs_whole_samples)

        return BatchStream(
            self._batches.parts(self._step, max_tokens * self._settings.world_size), loss.aggregation, micro_batches
        )

    def publish(self, weights: Weights, *, step: int, probe: Probe | None = None) -> int:
        """Publish the weights after step `step` as version `step`. Returns the bytes stored for them.

        Groups that are now too old expire.

        `weights` is a `transformers.PreTrainedModel`, published under the names and shapes that `save_pretrained`
        writes; a state dict (name -> torch tensor), published unchanged: convert a model's with `to_checkpoint_format`;
        or a folder with model.safetensors, shards and their index, or a LoRA adapter. Dtypes are kept, unless
        `publish_dtype` is set: models and state dicts are then rounded to it. A model sharded by FSDP is gathered on
        rank 0, tensor by tensor, while all ranks are in this call. No rank holds it whole, except with transport
        `nccl`.

        `probe` holds the trainer's logprobs of a few prompts under these weights: workers compare them with their
        engines' logprobs before they lease a group. A model's probe is computed here; for other weights see `probe_of`.

        With transport `nccl` the call returns when the workers have the weights; workers that failed get them later.
        Raises `WeightsError`, including for a state dict whose names or shapes differ from the weights given to
        `connect`, such as one with fused experts, and for a sharded state dict; `ConfigError` for a step whose batch
        was not taken yet; `VersionFalls` for a step before the live version; `FencedError`; and `ReplayMismatch` with
        `on_replay_mismatch = "fail"`.
        """
        if step > (last_step := self._batches.last_step):
            raise ConfigError(
                f"publish(step={step!r}): the last batch was for step {last_step}; pass the step of the last "
                "batch that these weights learned from"
            )
        before = self._publisher.stored_bytes
        settings = self._settings
        with gathering(weights, probe, rank=settings.rank, dtype=settings.publish_dtype) as source:
            if source is None:
                return 0
            with self._activity.during(TrainerPhase.PUBLISHING):
                stored = self._publisher.announce(source, step)
                self._replay.check(step, stored.digest)
                self._lease.buffer.publish(self._lease.epoch, step, uri=stored.uri, digest=stored.digest)
                self._publisher.send()
                self._engines.wake()
        return self._publisher.stored_bytes - before

    def prioritize(self, groups: Sequence[tuple[str, int]], priorities: npt.ArrayLike) -> int:
        """Change groups' priorities for the draws of later steps. Returns how many of the groups may still be trained.

        `groups` holds tasks and ids, as in `Batch.group_ids`, and `priorities` float [n] holds one priority for each. A
        group is drawn in proportion to its priority, which is 1 at first and falls by the task's `priority_decay` with
        each use. Call it before `commit` for the groups of a batch: a group that may be trained again keeps its
        priority. Groups of tasks with another order are ignored. Raises `FencedError`, and `ConfigError` if no task has
        order `priority` or a priority is not a finite number above 0.
        """
        drawn = {task for task, rules in self._sizes.rules.items() if rules.order == "priority"}
        if not drawn:
            raise ConfigError("prioritize: no task has order = 'priority', so nothing is drawn by priorities")
        by_task: dict[str, dict[int, float]] = {}
        for (task, group_id), priority in zip(groups, np.asarray(priorities, np.float64).tolist(), strict=True):
            if task in drawn:
                by_task.setdefault(task, {})[group_id] = priority
        if self._settings.rank != 0:
            return 0
        buffer, epoch = self._lease.buffer, self._lease.epoch
        return sum(buffer.prioritize(epoch, task, of_task) for task, of_task in by_task.items())

    def _check_entered(self) -> None:
        if not self._entered:
            raise ConfigError("use the consumer in a `with` block: it renews the trainer's lease only there")

    def commit(self, batch: Batch) -> None:
        """Record that `batch` has been trained, and move on to the next step.

        Harmless to repeat, even after later steps. Raises `FencedError`, and `NotClaimed` if the server has another
        batch for the step, as after a failover that lost recent writes.
        """
        if self._settings.rank == 0:
            trained: dict[str, list[int]] = {}
            for task, group_id in batch.group_ids:
                trained.setdefault(task, []).append(group_id)
            with self._traces.committing(batch.step, batch.group_ids):
                self._lease.buffer.commit(self._lease.epoch, batch.step, trained, keeps_copies=self._has_room())
        if batch.step < self._step:
            return
        if self._settings.rank == 0:
            self._batches.note_committed(batch.step)
        self._step = batch.step + 1
        lengths = {task: n.loss_tokens / n.samples for task, n in batch.task_counts.items() if n.samples}
        self._activity.commit(batch.step, batch.task_rewards, lengths)

    def _has_room(self) -> bool:
        """Whether groups are kept for another use: not while memory is full."""
        reuses = any(rules.max_uses > 1 for rules in self._sizes.rules.values())
        return not reuses or not self._lease.buffer.fullness().is_full

    def saving(self) -> AbstractContextManager[None]:
        """Show monitors that the trainer is saving a checkpoint while the context is open."""
        return self._activity.during(TrainerPhase.SAVING)

    def checkpoint(self, step: int) -> None:
        """Record that a checkpoint on disk covers `step`, so that batches up to it leave the buffer. Raises
        `FencedError`."""
        if self._settings.rank == 0:
            self._lease.buffer.checkpoint(self._lease.epoch, step)

    def release(self, batch: Batch, mode: ReleaseMode) -> None:
        """Give up a batch: `return` it, `drop` it, or `quarantine` it for audit. The step then gets a new batch.

        All other ranks next get the batch that rank 0 gets after its release, without a barrier. Raises `FencedError`.
        """
        if self._settings.rank == 0:
            self._lease.buffer.release(self._lease.epoch, batch.step, mode, claim_round=batch.claim_round)
            self._engines.wake()
        self._batches.give_up(batch.step)

    def take_production(self) -> dict[str, Production]:
        """Return what each task has produced since the last call; empty on ranks other than 0."""
        if self._settings.rank != 0:
            return {}
        return take_production(self._lease.buffer, self._sizes.rules)

    def report(self, facts: Mapping[str, Any]) -> None:
        """Store plain facts about the last step, for `rollq status`: any JSON values, up to 1 MiB.

        With a `step`, the numbers in `rollq.buffer.values.curves` are kept by step. A further report of the step adds
        to them. Raises `ConfigError` for other values, and `FencedError`.
        """
        if self._settings.rank == 0:
            self._lease.buffer.report_trainer(self._lease.epoch, facts)

    def annotate(self, batch: Batch, values: Mapping[str, npt.ArrayLike], sequences: npt.ArrayLike) -> None:
        """Write values of this rank's loss tokens to a file beside the archive; has no effect without an archive.

        `values` maps names to arrays [n], such as `logprob`, `ratio` and `clipped`; `sequences` [n] are indices into
        `batch.sequences`, as in `micro.sequence_index[micro.loss_mask]`. The tokens of a sequence are in order. A
        thread writes the file. Errors are logged and never stop training. Call it before `commit`, once or per
        micro-batch: each call makes a file.
        """
        if self._annotator:
            self._annotator.annotate(batch, values, sequences)

    def evaluate(
        self,
        names: Sequence[str] | None = None,
        *,
        timeout_s: float | None = None,
        detailed: bool = False,
        function: MetricFunction | None = None,
    ) -> dict[str, float]:
        """Run evaluations (default: all) with the live weights, and return their metrics as `eval/<name>/...`.

        Producers schedule every prompt of an evaluation, workers generate them before the training groups of the next
        step, and their groups are never trained. Do not publish weights during an evaluation: every token must come
        from the live version. After `timeout_s` the metrics cover the finished groups. Only rank 0 evaluates. Other
        ranks get {}, and so does rank 0 if the trainer is stopped before the end.
        `rollq.buffer.calls.evaluation_metrics` defines the metrics, and `function` adds others. Rewards are kept by
        train step, under the last committed step. Raises `ConfigError` for an unknown evaluation, and `FencedError` if
        another trainer has taken over, since the live weights are then no longer this trainer's.
        """
        if self._settings.rank != 0:
            return {}
        with self._activity.during(TrainerPhase.EVALUATING):
            metrics = evaluate(
                self._lease,
                names,
                timeout_s=timeout_s,
                detailed=detailed,
                function=function,
                events=self._events,
                stop=self._stop,
                meanwhile=self._publisher.serve_late,
            )
        self._lease.buffer.report_evaluations(self._lease.epoch, self._step - 1, rewards_of(metrics))
        return metrics
