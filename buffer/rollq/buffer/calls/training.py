"""The trainer's side of the buffer: epochs, batches, commits, checkpoints, published versions.

Nothing is atomic across tasks, so the next caller can finish every call here: a call changes the run first, then every
task, and returns only when all are changed.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import orjson

from rollq.buffer.calls.claiming import Claiming
from rollq.buffer.calls.core import number, pairs
from rollq.buffer.calls.fetching import Fetching
from rollq.buffer.calls.replies.tasks import Clock, Production
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.calls.sweeping import MAX_IDS_PER_CALL
from rollq.buffer.calls.trainer_process import Holder, process_of, this_process
from rollq.buffer.common.whole_numbers import whole_number
from rollq.buffer.errors import ConfigError, FencedError, HistoryGone, StoreLost, TaskBehind, TrainerHeld
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.curves import as_number, numbers_of, step_of
from rollq.buffer.values.trainer_state import TrainerPhase

ResumeMode = Literal["replay", "return", "regenerate"]
TRAINER_LEASE_S = 30.0
"""How long after its last call a trainer keeps other trainers out, in seconds. Safety depends only on epochs."""
CHECKPOINT_IDS_PER_CALL = 200
MOST_REPORT_BYTES = 1 << 20
STARTING: Mapping[str, Any] = {"phase": TrainerPhase.STARTING.value, "for_s": 0.0}


class Training(Fetching, Claiming):
    """The trainer's calls: `claim` and `fetch` on every rank, `join_epoch` on ranks other than 0, the rest on rank
    0."""

    def begin_epoch(
        self,
        *,
        trainer_id: str,
        launch_id: str,
        from_step: int,
        mode: ResumeMode = "replay",
        uri: str,
        digest: str,
        takeover: bool = False,
        lineage: str | None = None,
        accept_new_store: bool = False,
    ) -> TrainerEpoch:
        """Take the run as its trainer, at `from_step` (0: initial weights), and publish those weights.

        Batches after `from_step` are served again (`replay`), go back to completed (`return`) or have their prompts
        sampled again (`regenerate`). The same `launch_id` gets the same epoch, until another launch has replaced it.
        Other launches are refused while a trainer holds the run, unless that trainer's process is known to have ended
        or `takeover` is set; `trainer_id` names the trainer to other launches. `lineage` is the lineage of the trainer
        that saved the checkpoint (see `lineage_of`). With a lineage, a checkpoint is refused if its steps were undone,
        if the run has not reached its step, or, unless `accept_new_store`, if it belongs to a different store. Raises
        `TrainerHeld`, `FencedError` if the launch was replaced, `HistoryGone` naming the steps to resume from,
        `StoreLost`.
        """
        if from_step < 0:
            raise ConfigError(f"from_step is {from_step}: must be a step, 0 or more")
        saved_in = self._saved_in(lineage, from_step, accept_new_store=accept_new_store)
        tasks = self.tasks()
        holder = self.holder()
        replaces = takeover or (holder is not None and holder.has_ended)
        holders_epoch, holders_launch = (holder.epoch, holder.launch_id) if holder else (0, None)
        if holders_launch != launch_id:
            rival = None if replaces else holder
            self._check_history(tasks, from_step, rival, accept_new_store=accept_new_store)
        epoch, nonce, at_step, as_mode = self._take_run(
            trainer_id, launch_id, secrets.token_hex(8), from_step, mode, uri, digest, round(TRAINER_LEASE_S * 1000),
            int(replaces), holders_epoch, saved_in, this_process(launch_id),
        )  # fmt: skip
        held = self._rewind(tasks, TrainerEpoch(epoch, nonce.decode(), at_step, trainer_id, launch_id), as_mode)
        self.call("announce_epoch", self.keys.info, self.incarnation, epoch, held.nonce)
        return held

    def _rewind(self, tasks: Iterable[str], held: TrainerEpoch, mode: bytes) -> TrainerEpoch:
        """Carry the epoch into the tasks and treat the batches after its first step according to `mode`; returns the
        epoch with the last replayed step."""
        batches = {task: self._carry_epoch(task) for task in tasks}
        # before the manifests are dropped, or a successor would miss these plans; the last plan may have no batch
        last_claimed = max((steps.stop - 1 for steps in batches.values()), default=held.from_step)
        replayed_through = last_claimed if mode == b"replay" else held.from_step
        self._forget_plans(held, replayed_through + 1, last_claimed + 1, spared=held.epoch)
        for task, steps in batches.items():
            for step in range(steps.stop - 1, max(steps.start - 1, held.from_step), -1):
                self.call_task("rewind", task, held.epoch, held.nonce, step, mode)
            self._recount(held, task)
        return replace(held, replayed_through=replayed_through)

    def holder(self) -> Holder | None:
        """The trainer of the live epoch, alive or dead; None before the first trainer."""
        names = ("epoch", "trainer_id", "launch_id", "process", "deadline_ms")
        epoch, trainer_id, launch_id, process, deadline_ms = self.send("HMGET", self.keys.trainer, *names)
        if not epoch:
            return None
        deadline_ms, launch = int(deadline_ms or 0), (launch_id or b"").decode()
        left_s = (deadline_ms - self.server_ms()) / 1000
        return Holder(
            int(epoch), (trainer_id or b"").decode(), launch, process_of(process, launch), deadline_ms, left_s
        )

    def _take_run(self, *args: Any) -> Any:
        try:
            return self.call("run_begin_epoch", self.keys.info, self.incarnation, *args)
        except TrainerHeld as error:
            holder = self.holder()
            raise (TrainerHeld(self.held_by(holder)) if holder else error) from None

    def held_by(self, holder: Holder) -> str:
        """The error message that a trainer holds the run, with the way to take the run over."""
        return (
            f"{holder} holds run {self.run!r}, and its lease lasts another {max(0, holder.left_s):.0f} s: stop it, or "
            "set takeover = true to take over the run"
        )

    def check_epoch(self, held: TrainerEpoch) -> None:
        """Raise `FencedError` if another trainer has taken the run since this epoch began."""
        live = self._live_epoch()
        if (live.epoch, live.nonce) != (held.epoch, held.nonce):
            raise FencedError(f"epoch {held.epoch} was replaced by epoch {live.epoch}")

    def lineage_of(self, held: TrainerEpoch) -> str:
        """The store and epoch that the trainer's weights belong to. Save the result in every checkpoint."""
        return f"{self.incarnation}:{held.epoch}"

    def knows_lineage(self, lineage: str) -> bool:
        """Whether a checkpoint of this lineage was saved in this run, or in a run whose snapshot became this run."""
        incarnation, _ = _parse_lineage(lineage)
        return incarnation == self.incarnation or incarnation in self._ancestors()

    def _ancestors(self) -> dict[str, tuple[int, int]]:
        """The incarnations that this run was restored from, with each snapshot's last step and epoch."""
        found: dict[str, tuple[int, int]] = orjson.loads(self.send("HGET", self.keys.info, "ancestors") or b"{}")
        return found

    def _saved_in(self, lineage: str | None, from_step: int, *, accept_new_store: bool) -> str:
        """Return the epoch in which a checkpoint was saved; '' without a lineage.

        If the checkpoint's trainer had a different store, raises `StoreLost`, or with `accept_new_store` returns ''.
        """
        if not lineage:
            return ""
        incarnation, epoch = _parse_lineage(lineage)
        if incarnation == self.incarnation:
            return str(epoch)
        if incarnation not in (ancestors := self._ancestors()):
            if accept_new_store:
                return ""
            raise StoreLost(
                f"the checkpoint of step {from_step} belongs to another store: the store of run {self.run!r} is new "
                "or was emptied, and its prompts start over. Load a snapshot (`rollq snapshot load`), or use a new "
                "run name; to continue with this store, set accept_new_store = true"
            )
        last_step, last_epoch = ancestors[incarnation]
        if from_step > last_step or epoch > last_epoch:
            raise HistoryGone(
                f"the checkpoint of step {from_step} is newer than the restored snapshot: resume from a checkpoint of "
                f"step {last_step} or earlier that was saved before the snapshot"
            )
        return str(epoch)

    def join_epoch(self, launch_id: str) -> TrainerEpoch | None:
        """For a launch's other ranks: the epoch that its rank 0 has started; None until then. Raises `FencedError` if
        the launch was replaced, and `StoreLost`.
        """
        self.tasks()
        names = ("launch_id", "epoch", "nonce", "announced", "from_step", "trainer_id")
        replaced = self.send("ZSCORE", self.keys.launches, launch_id)
        raw = self.send("HMGET", self.keys.trainer, *names)
        live, epoch, nonce, announced, from_step, trainer_id = (value and value.decode() for value in raw)
        if replaced is not None:
            raise FencedError(f"launch {launch_id!r} was replaced by launch {live!r}")
        if live != launch_id or announced != nonce:
            return None
        return TrainerEpoch(int(epoch), nonce, int(from_step), trainer_id, launch_id)

    def recorded_digest(self, version: int) -> str | None:
        """The digest of the weights last published as `version`; None if a checkpoint covers that version."""
        digest = self.send("HGET", self.keys.versions, str(version))
        return digest.decode() if digest else None

    def published_as(self, digest: str) -> int | None:
        """The last version that the weights with this manifest sha256 were published as; None if unknown.

        Versions that a checkpoint covers are forgotten, except the live version.
        """
        known = self.send("HGETALL", self.keys.versions)
        found = [int(version) for version, one in known.items() if one.decode() == digest]
        live = self.live_model()
        if live is not None and live.digest == digest:
            found.append(live.version)
        return max(found, default=None)

    def regenerate_replays(self, held: TrainerEpoch, after: int) -> None:
        """Sample the prompts of recorded batches after step `after` again, instead of serving these batches."""
        self._forget_plans(held, after + 1, held.replayed_through, spared=held.epoch)
        for task in self.train_tasks():
            for step in range(held.replayed_through, after, -1):
                self.call_task("rewind", task, held.epoch, held.nonce, step, "regenerate")

    def _check_history(
        self, tasks: Iterable[str], from_step: int, holder: Holder | None, *, accept_new_store: bool
    ) -> None:
        """Refuse an impossible resume before anything moves. Raise `TrainerHeld` if `holder` keeps the trainer out."""
        problem = _history_problem({task: self.clock(task) for task in tasks}, from_step, accept_new_store)
        if problem and holder is not None and holder.left_s > 0:
            raise TrainerHeld(self.held_by(holder))
        if problem:
            raise HistoryGone(problem)

    def call_task(self, name: str, task: str, *args: Any) -> Any:
        """Like `RunStore.call_task`, but first brings the epoch into a task that was registered while the epoch
        started."""
        try:
            return super().call_task(name, task, *args)
        except TaskBehind:
            self._carry_epoch(task)
            return super().call_task(name, task, *args)

    def renew_trainer(self, held: TrainerEpoch, doing: Mapping[str, Any] = STARTING) -> None:
        """Extend the trainer's hold on the run, and record what it is doing, as in `TrainerState`. Raises `FencedError`
        if the trainer was replaced.
        """
        self._renew(held, round(TRAINER_LEASE_S * 1000), doing)

    def end_lease(self, held: TrainerEpoch, doing: Mapping[str, Any] = STARTING) -> None:
        """Let another trainer take the run at once, and record how this trainer ended. Raises `FencedError` if this
        trainer was replaced.
        """
        self._renew(held, 0, doing)

    def _renew(self, held: TrainerEpoch, lease_ms: int, doing: Mapping[str, Any]) -> None:
        words = orjson.dumps({"epoch": held.epoch, **doing})
        self.call("renew_trainer", self.keys.info, self.incarnation, held.epoch, held.nonce, lease_ms, words)

    def report_trainer(self, held: TrainerEpoch, report: Mapping[str, Any]) -> None:
        """Store plain facts about the last step for monitors; numbers that have curves are kept for each `step`.

        Raises `FencedError`, and `ConfigError` for values that JSON lacks and for more than 1 MiB.
        """
        try:
            facts = orjson.dumps(dict(report))
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"a report must be valid JSON: {error}") from error
        if len(facts) > MOST_REPORT_BYTES:
            raise ConfigError(f"a report of {len(facts):,} bytes is too large: the limit is {MOST_REPORT_BYTES:,}")
        step = step_of(report)
        self._report(held, facts, "curves", step, {} if step is None else numbers_of(report))

    def report_evaluations(self, held: TrainerEpoch, step: int, rewards: Mapping[str, float]) -> None:
        """Store evaluations' mean rewards, by name, for the weights after `step`. Raises `FencedError`."""
        rounded = {name: number for name, reward in rewards.items() if (number := as_number(reward)) is not None}
        self._report(held, b"", "evaluations", step, rounded)

    def _report(
        self, held: TrainerEpoch, facts: bytes, curves: str, step: int | None, numbers: Mapping[str, float]
    ) -> None:
        pairs = [item for name, number in numbers.items() for item in (name, number)]
        fence = (self.incarnation, held.epoch, held.nonce)
        self.call("report_trainer", self.keys.info, *fence, facts, curves, step or 0, *pairs)

    def sleep(self, held: TrainerEpoch, why: str) -> None:
        """Make engines free their memory; workers then report `why` as `asleep_for`. '' wakes them.

        The control of production is not changed. Raises `FencedError`.
        """
        for task in self.tasks():
            self._change_control("sleep", task, held.epoch, held.nonce, why)

    def commit(
        self,
        held: TrainerEpoch,
        step: int,
        trained: Mapping[str, Sequence[int]] | None = None,
        *,
        keeps_copies: bool = True,
    ) -> None:
        """Record that the batch of `step` has been trained. Harmless to repeat.

        `trained` maps each task to its group ids in the batch, in order. Without `keeps_copies`, groups that may be
        trained again are not kept for this, and are counted as `not_reused`.
        Raises `FencedError`, and `NotClaimed` if the step was not claimed or has a different batch.
        """
        taking_part, trained = self._taking_part(step), trained or {}
        unfilled = self._unfilled(step, sorted(taking_part))
        # tasks that may refuse come first: if one refuses, no other has taken the step
        for task in sorted(self.tasks(), key=lambda task: (task not in unfilled, task not in taking_part)):
            ids = ",".join(map(str, trained.get(task, ())))
            self.call_task(
                "commit", task, held.epoch, held.nonce, step, int(task in taking_part), int(keeps_copies), ids
            )

    def _unfilled(self, step: int, tasks: Sequence[str]) -> set[str]:
        """The tasks that still lack groups in a step's batch."""
        found = self.send_all([("HMGET", task_keys(self.run, task).manifest(step), "ids", "open") for task in tasks])
        return {task for task, (ids, fills) in zip(tasks, found, strict=True) if fills or not ids}

    def _taking_part(self, step: int) -> set[str]:
        """The tasks that have groups in a step's batch."""
        sizes = self.send("HGET", self.keys.plan(step), "sizes")
        return set(orjson.loads(sizes) if sizes else self.train_tasks())

    def checkpoint(self, held: TrainerEpoch, step: int) -> None:
        """Record that a checkpoint covers all steps up to `step`, and drop their batches.

        While the buffer is being saved, batches stay; the next checkpoint drops them.
        """
        taking_part = self._taking_part(step)
        for task in sorted(self.tasks(), key=lambda task: task not in taking_part):
            if task not in taking_part:  # a task that joined later has recorded only published steps
                self.call_task("commit", task, held.epoch, held.nonce, step, 0, 1, "")
            before = self.clock(task).first_manifest
            while self.call_task("checkpoint", task, held.epoch, held.nonce, step, CHECKPOINT_IDS_PER_CALL):
                pass
            # keep the plans of batches that stay while the buffer is copied
            self._forget_plans(held, before + 1, self.clock(task).first_manifest)

    def publish(self, held: TrainerEpoch, version: int, *, uri: str, digest: str) -> None:
        """Make weights the live weights: workers swap to them, and groups that are now too stale no longer count.

        `digest` is the sha256 of the weights' manifest, in hex. If an earlier trainer published the same weights as
        this version, tokens from these weights count as this version again. A digest in another form never matches.
        Raises `FencedError` if the trainer was replaced, `VersionFalls` if the version is older than the live version.
        """
        since = self.call("run_publish", self.keys.info, self.incarnation, held.epoch, held.nonce, version, uri, digest)
        for task in self.tasks():
            if self.call_task("task_publish", task, held.epoch, held.nonce, version, since):
                self._recount(held, task)

    def _recount(self, held: TrainerEpoch, task: str) -> None:
        after: Any = "-inf"
        while after:
            after = self.call_task("recount", task, held.epoch, held.nonce, after, MAX_IDS_PER_CALL)

    def take_production(self, task: str) -> Production:
        """Return the production since the last call. For monitoring only: a lost reply loses its numbers."""
        now_ms, sums, timings = self.call_task("take_production", task)
        window = {name.decode(): number(value) for name, value in pairs(sums)}
        since_ms = window.pop("since_ms", now_ms)
        return Production((now_ms - since_ms) / 1000, window, tuple(int(timing) for timing in timings))


def _history_problem(clocks: Mapping[str, Clock], from_step: int, accept_new_store: bool) -> str | None:
    """Why the tasks with these clocks cannot go back to `from_step`; None if they can."""
    for task, clock in clocks.items():
        if problem := _gone(clock, from_step):
            return f"task {task!r}: {problem}"
    last_step = max((clock.claimed_step for clock in clocks.values()), default=0)
    if from_step > last_step and not accept_new_store:
        return (
            f"resume_from = {from_step} is beyond step {last_step}, the run's last: the checkpoint belongs to "
            "another run, or the server lost its last moments and would serve trained groups again; resume from "
            f"step {last_step} or earlier, or set accept_new_store = true to continue with the server as it is"
        )
    return None


def _gone(clock: Clock, from_step: int) -> str | None:
    """Why `task_begin_epoch` would refuse to take a task back to `from_step`; None if it would not."""
    if from_step < clock.history:
        return (
            f"step {from_step} is older than what is kept; the oldest step to resume from is {clock.history}; "
            "if its checkpoint is lost, `rollq runs recover` makes one from weights; to start afresh, give the run "
            "another name"
        )
    if clock.claimed_step < from_step <= clock.undone:
        return (
            f"a rewind undid step {from_step}, and its groups may be trained again; the newest step to resume from is "
            f"{clock.claimed_step}"
        )
    return None


def _parse_lineage(lineage: str) -> tuple[str, int]:
    incarnation, _, epoch = lineage.partition(":")
    number = whole_number(epoch)
    if not incarnation or number is None:
        raise ConfigError(f"lineage {lineage[:80]!r}: pass the `Consumer.lineage` from when the checkpoint was saved")
    return incarnation, number
