"""The trainer's side of the buffer: epochs, batches, commits, checkpoints, published versions.

Across tasks nothing is atomic, so every call here is written to be finished by the next caller: the run first, then
every task, and back only when all are done.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson

from rollq.buffer.core import number, pairs
from rollq.buffer.errors import ConfigError, HistoryGone, TrainerHeld
from rollq.buffer.fetching import Fetching
from rollq.buffer.replies import Claimed, ClaimedGroup, Production, Shortfall, TrainerEpoch
from rollq.buffer.rollouts import PipelineOutput
from rollq.buffer.store.keys import task_keys
from rollq.buffer.sweeping import MAX_IDS_PER_CALL, Sweeping

ResumeMode = Literal["replay", "return", "regenerate"]
ReleaseMode = Literal["return", "drop", "quarantine"]
TRAINER_LEASE_S = 30.0
"""For so long after its last sign of life a trainer keeps others out; safety rests on epochs alone."""
CHECKPOINT_IDS_PER_CALL = 200


class Training(Fetching, Sweeping):
    """Calls of the trainer; all but `claim` and `fetch` are rank 0's."""

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
    ) -> TrainerEpoch:
        """Take the run as its trainer, standing at `from_step` (0: initial weights), and publish those weights.

        Batches after `from_step` are served again (`replay`), go back to completed (`return`) or have their prompts
        sampled again (`regenerate`). The same `launch_id` gets the same epoch: every rank of a launch calls this.
        Raises TrainerHeld, HistoryGone naming the oldest step to resume from, StoreLost.
        """
        if from_step < 0:
            raise ConfigError(f"from_step is {from_step}: a step from 0 on is needed")
        tasks = self.tasks()
        self._check_history(tasks, from_step, None if takeover else trainer_id)
        epoch, nonce, at_step, as_mode = self.call(
            "run_begin_epoch", self.keys.info, self.incarnation, trainer_id, launch_id, secrets.token_hex(8), from_step,
            mode, uri, digest, round(TRAINER_LEASE_S * 1000), int(takeover),
        )  # fmt: skip
        held = TrainerEpoch(epoch, nonce.decode(), at_step, trainer_id, launch_id)
        claimed = {task: self.call_task("task_begin_epoch", task, epoch, held.nonce, at_step) for task in tasks}
        # before the manifests go, or a successor would not know of these plans; no batch was claimed by the last one
        last_claimed = max(claimed.values(), default=at_step)
        self._forget_plans(held, (last_claimed if as_mode == b"replay" else at_step) + 1, last_claimed + 1)
        for task, claimed_step in claimed.items():
            for step in range(claimed_step, at_step, -1):
                self.call_task("rewind", task, epoch, held.nonce, step, as_mode)
            while self.call_task("clamp", task, epoch, held.nonce, at_step, MAX_IDS_PER_CALL):
                pass
        return held

    def _check_history(self, tasks: Iterable[str], from_step: int, trainer_id: str | None) -> None:
        """Refuse a resume that cannot work before anything moves; who is not wanted anyway is told that instead."""
        for task in tasks:
            clock = self.clock(task)
            if from_step < clock.history:
                if trainer_id is not None:
                    self._check_holder(trainer_id)
                raise HistoryGone(
                    f"task {task!r}: step {from_step} is older than what is kept; "
                    f"the oldest step to resume from is {clock.history}; to begin anew, give the run another name"
                )

    def _check_holder(self, trainer_id: str) -> None:
        holder, deadline_ms = self.send(lambda: self.client.hmget(self.keys.trainer, "trainer_id", "deadline_ms"))
        if holder and holder.decode() != trainer_id and int(deadline_ms) > self.server_ms():
            raise TrainerHeld(f"trainer {holder.decode()!r} holds the run; wait until it ends, or take over on purpose")

    def renew_trainer(self, held: TrainerEpoch) -> None:
        """Show that the trainer lives. Raises FencedError when it was replaced."""
        lease_ms = round(TRAINER_LEASE_S * 1000)
        self.call("renew_trainer", self.keys.info, self.incarnation, held.epoch, held.nonce, lease_ms)

    def sleep(self, held: TrainerEpoch, why: str) -> None:
        """Have engines give their memory away; workers report `why` as `asleep_for` once they have. '' wakes them.

        What production is set to stays as it is. Raises FencedError.
        """
        for task in self.tasks():
            self.call_task("sleep", task, held.epoch, held.nonce, why)

    # -- batches ----------------------------------------------------------------------------------------------------

    def claim(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], *, short_ok: bool = False
    ) -> Claimed | Shortfall:
        """Return the batch of `step`, `sizes[task]` groups of each task, or what is short. Does not wait.

        The first outcome is stored: later calls, by any rank and after any crash, return the same batch. The step is
        claimed for all tasks or for none; with `short_ok`, of a task that is short what there is.
        Raises FencedError, HistoryGone, CheckpointOverdue, ConfigError.
        """
        for task, size in sizes.items():
            if not 0 <= size <= MAX_IDS_PER_CALL:
                raise ConfigError(f"task {task!r}: a batch of {size} groups; 0 to {MAX_IDS_PER_CALL} are possible")
        while True:
            if short_ok:
                if len(self._without_manifest(sizes, step)) == len(sizes):
                    self._forget_plans(held, step, step)  # of a claim that wanted more
                sizes = {task: min(size, self.readiness(task, step)[0]) for task, size in sizes.items()}
            outcome = self._try_claim(held, step, sizes)
            if outcome is not None:
                return outcome

    def _try_claim(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> Claimed | Shortfall | None:
        """One round of claiming; None when another rank undid or delivered it meanwhile."""
        plan = ("plan", self.keys.info, self.incarnation, held.epoch, held.nonce, step, orjson.dumps(dict(sizes)))
        # a task alone cannot be torn from others: it is claimed in the same trip, and its plan needs no second look
        early = [self._claim_call(held, step, *item, 0) for item in sizes.items()] if len(sizes) == 1 else []
        (standing, delivered, round_), *early = self.call_all([(*plan, "look", 0), *early])
        wanted: dict[str, int] = orjson.loads(standing)
        missing = self._without_manifest(wanted, step) if len(wanted) > 1 else []
        if len(missing) > 1:
            found = {task: self.readiness(task, step) for task in missing if wanted[task]}
            if any(ready < wanted[task] or stragglers for task, (ready, stragglers) in found.items()):
                return _shortfall(step, found, wanted)
        replies = dict(zip(sizes, early, strict=False))
        groups: list[ClaimedGroup] = []
        floors: dict[str, Mapping[int, int]] = {}
        for task, size in wanted.items():
            reply = replies.get(task) or self.call_all([self._claim_call(held, step, task, size, round_)])[0]
            while reply[0] == b"sweep" and self.expire(task):
                (reply,) = self.call_all([self._claim_call(held, step, task, size, round_)])
            if reply[0] != b"batch":
                if len(wanted) > 1:
                    _, delivered, _ = self.call(*plan, "undo", round_)
                    if delivered:
                        return None
                    self._release(held, wanted, step, "return", {}, up_to_round=round_)
                return _shortfall(step, {task: (reply[1], reply[2])}, wanted)
            floors[task] = _decode_floors(reply[1])
            groups += [_claimed_group(task, *fields) for fields in reply[2:]]
        if len(wanted) > 1 and not delivered:
            _, delivered, _ = self.call(*plan, "deliver", round_)
            if not delivered:
                return None
        return Claimed(step, tuple(groups), floors)

    def _claim_call(self, held: TrainerEpoch, step: int, task: str, size: int, round_: int) -> tuple[Any, ...]:
        return ("claim", task_keys(self.run, task).clock, self.incarnation, held.epoch, held.nonce, step, size, round_)

    def _without_manifest(self, tasks: Iterable[str], step: int) -> list[str]:
        names = list(tasks)
        found = self.send_all([("HEXISTS", task_keys(self.run, task).manifest(step), "ids") for task in names])
        return [task for task, exists in zip(names, found, strict=True) if not exists]

    def readiness(self, task: str, step: int) -> tuple[int, int]:
        """How many completed groups are fresh at `step`, and how many in generation are waited for because they would
        be too old at the step after it."""
        ready, stragglers = self.call_task("readiness", task, step)
        return ready, stragglers

    def release(
        self, held: TrainerEpoch, step: int, mode: ReleaseMode, *, bad: Mapping[str, Sequence[int]] | None = None
    ) -> int:
        """Give up a claimed batch: back to completed, dropped (counted) or quarantined. Returns how many groups.

        `bad`: task -> ids of groups that are quarantined in any mode.
        """
        count = self._release(held, self.tasks(), step, mode, bad or {})
        self._forget_plans(held, step, step)
        return count

    def _release(
        self,
        held: TrainerEpoch,
        tasks: Iterable[str],
        step: int,
        mode: ReleaseMode,
        bad: Mapping[str, Sequence[int]],
        *,
        up_to_round: int = -1,
    ) -> int:
        fence = (held.epoch, held.nonce, step, mode, up_to_round)
        return sum(int(self.call_task("release", task, *fence, *bad.get(task, ()))) for task in tasks)

    def commit(self, held: TrainerEpoch, step: int) -> None:
        """The batch of `step` has been trained. Harmless to repeat. Raises FencedError."""
        tasks = self.tasks()
        sizes = self.send(lambda: self.client.hget(self.keys.plan(step), "sizes"))
        taking_part = orjson.loads(sizes) if sizes else tasks
        for task in tasks:
            self.call_task("commit", task, held.epoch, held.nonce, step, int(task in taking_part))

    def checkpoint(self, held: TrainerEpoch, step: int) -> None:
        """A checkpoint covers `step` and all before: their batches will not be asked for again, and are dropped."""
        for task in self.tasks():
            before = self.clock(task).checkpoint
            while self.call_task("checkpoint", task, held.epoch, held.nonce, step, CHECKPOINT_IDS_PER_CALL):
                pass
            # not those of batches that stay while a copy of the buffer is taken
            self._forget_plans(held, before + 1, self.clock(task).checkpoint)

    def publish(self, held: TrainerEpoch, version: int, *, uri: str, digest: str) -> None:
        """Make weights the live ones: workers swap, and what is too stale stops counting at once.

        Raises FencedError when the trainer was replaced or the version would fall.
        """
        self.call("run_publish", self.keys.info, self.incarnation, held.epoch, held.nonce, version, uri, digest)
        for task in self.tasks():
            self.call_task("task_publish", task, held.epoch, held.nonce, version)

    def take_production(self, task: str) -> Production:
        """What was produced since the last call of it. For people: after a lost reply these numbers are lost too."""
        now_ms, sums, timings = self.call_task("take_production", task)
        window = {name.decode(): number(value) for name, value in pairs(sums)}
        since_ms = window.pop("since_ms", now_ms)
        return Production((now_ms - since_ms) / 1000, window, tuple(int(timing) for timing in timings))

    def _forget_plans(self, held: TrainerEpoch, first: int, last: int) -> None:
        if first <= last:
            self.call("forget_plans", self.keys.info, self.incarnation, held.epoch, held.nonce, first, last)


def _claimed_group(
    task: str, group_id: int, oldest: int, arrival: int, tries: int, tokens: int, reward: bytes | None, shaped: bytes
) -> ClaimedGroup:
    pipeline = _decode_shaped(shaped) if shaped else None
    return ClaimedGroup(task, group_id, oldest, arrival, tries, tokens, float(reward or 0), pipeline)


def _decode_shaped(stored: bytes) -> PipelineOutput:
    given = orjson.loads(stored)
    return PipelineOutput(tuple(given["rewards"]), given["advantages"] and tuple(given["advantages"]))


def _decode_floors(listed: bytes) -> dict[int, int]:
    """`epoch:version,...` as the functions write it."""
    pairs = (entry.split(":") for entry in listed.decode().split(",") if entry)
    return {int(epoch): int(version) for epoch, version in pairs}


def _shortfall(step: int, found: Mapping[str, tuple[int, int]], wanted: Mapping[str, int]) -> Shortfall:
    short = {task: (ready, late) for task, (ready, late) in found.items() if ready < wanted[task] or late}
    return Shortfall(
        step,
        ready={task: ready for task, (ready, _) in short.items()},
        wanted={task: wanted[task] for task in short},
        stragglers={task: late for task, (_, late) in short.items() if late},
    )
