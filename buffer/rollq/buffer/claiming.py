"""Batches of train steps: claimed from what is completed, and released.

Across tasks nothing is atomic. A step of several tasks is therefore planned first: the plan fixes its sizes per task,
and decides between ranks that deliver the batch and ranks that undo it because one task came up short.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from rollq.buffer.errors import ConfigError
from rollq.buffer.replies import Claimed, ClaimedGroup, Shortfall, TrainerEpoch
from rollq.buffer.rollouts import PipelineOutput
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.sweeping import MAX_IDS_PER_CALL, Sweeping

ReleaseMode = Literal["return", "drop", "quarantine"]


class _Plan(NamedTuple):
    """The plan of a step: groups per task, whether its batch was delivered once, and the round of claiming."""

    sizes: dict[str, int]
    delivered: bool
    claim_round: int


class Claiming(Sweeping):
    """The trainer's calls that take batches and give them back; any rank may claim."""

    def claim(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], *, short_ok: bool = False
    ) -> Claimed | Shortfall:
        """Return the batch of `step`, `sizes[task]` groups of each task, or what it lacks. Does not wait.

        The first outcome is stored: later calls, by any rank and after any crash, return the same batch. The step is
        claimed for all tasks or for none; with `short_ok`, a task that is short gives what it has.
        Raises `FencedError`, `HistoryGone`, `CheckpointOverdue`, `ConfigError`.
        """
        for task, size in sizes.items():
            if not 0 <= size <= MAX_IDS_PER_CALL:
                raise ConfigError(f"task {task!r}: a batch of {size} groups; 0 to {MAX_IDS_PER_CALL} are possible")
        while True:
            if short_ok:
                sizes = self._sizes_at_hand(held, step, sizes)
            claim = self._claim_single if len(sizes) == 1 else self._claim_together
            outcome = claim(held, step, sizes)
            if outcome is not None:
                return outcome

    def _sizes_at_hand(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes, cut down to what is ready."""
        if len(self._without_manifest(sizes, step)) == len(sizes):
            self._forget_plans(held, step, step)  # of a claim that wanted more
        return {task: min(size, self.readiness(task, step)[0]) for task, size in sizes.items()}

    def _claim_single(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> Claimed | Shortfall | None:
        """Claim a step of one task. It cannot be torn, so it is claimed in the same trip as it is planned."""
        ((task, size),) = sizes.items()
        planned, reply = self.call_all(
            [self._plan_call(held, step, sizes, "look", 0), self._claim_call(held, step, task, size, 0)]
        )
        plan = _decode_plan(planned)
        if plan.sizes.keys() != sizes.keys():  # an earlier call planned the step with other tasks
            return self._claim_together(held, step, plan.sizes)
        size = plan.sizes[task]
        reply = self._swept(held, step, task, size, plan.claim_round, reply)
        if reply[0] != b"batch":
            return _shortfall(step, {task: (reply[1], reply[2])}, plan.sizes)
        return _decode_claimed(step, {task: reply})

    def _claim_together(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> Claimed | Shortfall | None:
        """Claim a step of several tasks; None when another rank undid or delivered the claim meanwhile."""
        (planned,) = self.call_all([self._plan_call(held, step, sizes, "look", 0)])
        plan = _decode_plan(planned)
        if shortfall := self._look(step, plan):
            return shortfall
        replies: dict[str, Any] = {}
        for task, size in plan.sizes.items():
            reply = self.call_all([self._claim_call(held, step, task, size, plan.claim_round)])[0]
            reply = self._swept(held, step, task, size, plan.claim_round, reply)
            if reply[0] != b"batch":
                if not self._undo(held, step, plan):
                    return None
                return _shortfall(step, {task: (reply[1], reply[2])}, plan.sizes)
            replies[task] = reply
        # a rank that undoes and a rank that delivers ask for the same plan: only one of them succeeds
        delivered = plan.delivered or self._settle(held, step, plan, "deliver")
        return _decode_claimed(step, replies) if delivered else None

    def _look(self, step: int, plan: _Plan) -> Shortfall | None:
        """The shortfall of the step, found without claiming, so that claims are rarely torn."""
        missing = self._without_manifest(plan.sizes, step)
        if len(missing) < 2:
            return None
        found = {task: self.readiness(task, step) for task in missing if plan.sizes[task]}
        if any(ready < plan.sizes[task] or stragglers for task, (ready, stragglers) in found.items()):
            return _shortfall(step, found, plan.sizes)
        return None

    def _undo(self, held: TrainerEpoch, step: int, plan: _Plan) -> bool:
        """Give back what was claimed of a torn step; False when another rank has delivered it."""
        if self._settle(held, step, plan, "undo"):
            return False
        self._release(held, plan.sizes, step, "return", {}, up_to_round=plan.claim_round)
        return True

    def _swept(self, held: TrainerEpoch, step: int, task: str, size: int, claim_round: int, reply: Any) -> Any:
        """The reply to a claim, asked for again while stale groups are in the way."""
        while reply[0] == b"sweep" and self.expire(task):
            (reply,) = self.call_all([self._claim_call(held, step, task, size, claim_round)])
        return reply

    def _settle(self, held: TrainerEpoch, step: int, plan: _Plan, action: Literal["deliver", "undo"]) -> bool:
        """Deliver or undo the claims of this round; returns whether the batch is delivered, by whichever rank."""
        return _decode_plan(self.call(*self._plan_call(held, step, plan.sizes, action, plan.claim_round))).delivered

    def _plan_call(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], action: str, claim_round: int
    ) -> Command:
        encoded = orjson.dumps(dict(sizes))
        return ("plan", self.keys.info, self.incarnation, held.epoch, held.nonce, step, encoded, action, claim_round)

    def _claim_call(self, held: TrainerEpoch, step: int, task: str, size: int, claim_round: int) -> Command:
        clock = task_keys(self.run, task).clock
        return ("claim", clock, self.incarnation, held.epoch, held.nonce, step, size, claim_round)

    def _without_manifest(self, tasks: Iterable[str], step: int) -> list[str]:
        names = list(tasks)
        found = self.send_all([("HEXISTS", task_keys(self.run, task).manifest(step), "ids") for task in names])
        return [task for task, exists in zip(names, found, strict=True) if not exists]

    def readiness(self, task: str, step: int) -> tuple[int, int]:
        """Completed groups that are fresh at `step`, and groups in generation that are waited for because they would
        be too old at the step after it."""
        ready, stragglers = self.call_task("readiness", task, step)
        return ready, stragglers

    def release(
        self, held: TrainerEpoch, step: int, mode: ReleaseMode, *, bad: Mapping[str, Sequence[int]] | None = None
    ) -> int:
        """Give up a claimed batch: back to completed, dropped (counted) or quarantined. Returns its number of groups.

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

    def _forget_plans(self, held: TrainerEpoch, first: int, last: int) -> None:
        if first <= last:
            self.call("forget_plans", self.keys.info, self.incarnation, held.epoch, held.nonce, first, last)


def _decode_plan(reply: Any) -> _Plan:
    sizes, delivered, claim_round = reply
    return _Plan(orjson.loads(sizes), bool(delivered), claim_round)


def _decode_claimed(step: int, replies: Mapping[str, Any]) -> Claimed:
    """The batch from the replies to the claims of all its tasks: `batch`, the floors of dead epochs, then groups."""
    groups = [_claimed_group(task, *fields) for task, reply in replies.items() for fields in reply[2:]]
    return Claimed(step, tuple(groups), {task: _decode_floors(reply[1]) for task, reply in replies.items()})


def _claimed_group(
    task: str, group_id: int, oldest: int, arrival: int, tries: int, tokens: int, reward: bytes | None, shaped: bytes
) -> ClaimedGroup:
    pipeline = _decode_shaped(shaped) if shaped else None
    return ClaimedGroup(task, group_id, oldest, arrival, tries, tokens, float(reward or 0), pipeline)


def _decode_shaped(stored: bytes) -> PipelineOutput:
    fields = orjson.loads(stored)
    return PipelineOutput(tuple(fields["rewards"]), fields["advantages"] and tuple(fields["advantages"]))


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
