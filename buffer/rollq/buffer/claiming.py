"""Batches of train steps: claimed from what is completed, and released.

Across tasks nothing is atomic. A step of several tasks is therefore planned first: the plan fixes its sizes per task,
and decides between ranks that deliver the batch and ranks that undo it because one task came up short.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from rollq.buffer.errors import ConfigError
from rollq.buffer.replies import Claimed, ClaimedGroup, Readiness, Shortfall, TrainerEpoch
from rollq.buffer.rollouts import PipelineOutput
from rollq.buffer.staleness import Floors
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.pipelining import Command
from rollq.buffer.sweeping import MAX_IDS_PER_CALL, Sweeping

ReleaseMode = Literal["return", "drop", "quarantine"]


class _Plan(NamedTuple):
    """The plan of a step: groups per task (none before a rank has planned the round), whether its batch was delivered
    once, the round of claiming, and how often the step was released."""

    sizes: dict[str, int]
    delivered: bool
    claim_round: int
    releases: int


class Claiming(Sweeping):
    """The trainer's calls that take batches and give them back; any rank may claim."""

    def claim(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], *, short_ok: bool = False
    ) -> Claimed | Shortfall:
        """Return the batch of `step`, `sizes[task]` groups of each task, or what it lacks. Does not wait.

        The first outcome is stored: later calls, by any rank and after any crash, return the same batch, until it is
        released. The step is claimed for all tasks or for none; with `short_ok`, a task that is short gives what it
        has.
        Raises `FencedError`, `HistoryGone`, `CheckpointOverdue`, `ConfigError`.
        """
        if not sizes:
            raise ConfigError("a batch of no task: name the tasks and their groups")
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
        claim_round = self.send("HGET", self.keys.plan(step), "round")
        if claim_round is not None and len(self._without_manifest(sizes, step)) == len(sizes):
            self._replan(held, step, int(claim_round), released=False)  # a claim wanted more
        return {task: min(size, self.readiness(task, step).ready) for task, size in sizes.items()}

    def _claim_single(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> Claimed | Shortfall | None:
        """Claim a step of one task. It cannot be torn, so it is claimed in the same trip as it is planned."""
        (task,) = sizes
        planned, reply = self.call_all(
            [
                self._plan_call(held, step, sizes, "look", 0),
                self._claim_call(held, step, task, _FIRST_ROUND._replace(sizes=dict(sizes))),
            ]
        )
        plan = self._planned(held, step, sizes, _decode_plan(planned))
        if plan.sizes.keys() != sizes.keys():  # an earlier call planned the step with other tasks
            return self._claim_together(held, step, plan.sizes)
        if reply[0] == b"given_up" and plan.claim_round > 0:  # the batch of the first round
            (reply,) = self.call_all([self._claim_call(held, step, task, plan)])
        reply = self._swept(held, step, task, plan, reply)
        if reply[0] != b"batch":
            return _shortfall(step, {task: reply}, plan.sizes)
        return _decode_claimed(step, {task: reply})

    def _claim_together(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> Claimed | Shortfall | None:
        """Claim a step of several tasks; None when another rank undid or delivered the claim meanwhile."""
        plan = self._planned(held, step, sizes, self._settle(held, step, sizes, "look", 0))
        if shortfall := self._look(step, plan):
            return shortfall
        replies: dict[str, Any] = {}
        for task in plan.sizes:
            (reply,) = self.call_all([self._claim_call(held, step, task, plan)])
            reply = self._swept(held, step, task, plan, reply)
            if reply[0] == b"given_up":
                return _shortfall(step, {task: reply}, plan.sizes)
            if reply[0] != b"batch":
                return _shortfall(step, {task: reply}, plan.sizes) if self._undo(held, step, plan) else None
            replies[task] = reply
        # a rank that undoes and a rank that delivers ask for the same plan: only one of them succeeds
        if not plan.delivered:
            plan = self._settle(held, step, plan.sizes, "deliver", plan.claim_round)
        # what another rank has delivered may be of a later round, of which this rank has seen a part or nothing
        is_whole = all(reply[2] == plan.claim_round for reply in replies.values())
        return _decode_claimed(step, replies) if plan.delivered and is_whole else None

    def _look(self, step: int, plan: _Plan) -> Shortfall | None:
        """The shortfall of the step, found without claiming, so that claims are rarely torn."""
        missing = self._without_manifest(plan.sizes, step)
        if len(missing) < 2:
            return None
        found = {task: (b"short", *self.readiness(task, step)) for task in missing if plan.sizes[task]}
        shortfall = _shortfall(step, found, plan.sizes)
        return shortfall if shortfall.wanted else None

    def _undo(self, held: TrainerEpoch, step: int, plan: _Plan) -> bool:
        """Give back what was claimed of a torn step; False when another rank has delivered it."""
        if self._settle(held, step, plan.sizes, "undo", plan.claim_round).delivered:
            return False
        self._release(held, plan.sizes, step, "return", plan.claim_round, {})
        return True

    def _swept(self, held: TrainerEpoch, step: int, task: str, plan: _Plan, reply: Any) -> Any:
        """The reply to a claim, asked for again while stale groups are in the way."""
        while reply[0] == b"sweep" and self.expire(task):
            (reply,) = self.call_all([self._claim_call(held, step, task, plan)])
        return reply

    def plan_anew(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> bool:
        """Let the next claim of `step` take `sizes`, if its plan has others for a task and nothing of it is claimed.

        For rank 0, whose claim waits for groups while rules change. Returns whether the step is planned anew. Raises
        `FencedError`.
        """
        plan = self._planned(held, step, sizes, self._settle(held, step, sizes, "look", 0))
        wanted = {task: sizes.get(task, groups) for task, groups in plan.sizes.items()}  # a new task joins the next one
        if plan.delivered or wanted == plan.sizes or len(self._without_manifest(plan.sizes, step)) < len(plan.sizes):
            return False
        if len(plan.sizes) == 1:  # it is claimed with the sizes of the call
            return False
        if self._replan(held, step, plan.claim_round, released=False) <= plan.claim_round:
            return False  # another rank has delivered it meanwhile
        self._release(held, plan.sizes, step, "return", plan.claim_round, {})  # what another rank has claimed meanwhile
        return True

    def _planned(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], plan: _Plan) -> _Plan:
        """The plan, made with `sizes` if no rank has planned the present round yet."""
        while not plan.sizes:
            plan = self._settle(held, step, sizes, "look", plan.claim_round)
        return plan

    def _settle(
        self,
        held: TrainerEpoch,
        step: int,
        sizes: Mapping[str, int],
        action: Literal["look", "deliver", "undo"],
        claim_round: int,
    ) -> _Plan:
        """Look at the plan of a step, or deliver or undo the claims of a round; returns what any rank decided."""
        return _decode_plan(self.call(*self._plan_call(held, step, sizes, action, claim_round)))

    def _plan_call(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], action: str, claim_round: int
    ) -> Command:
        encoded = orjson.dumps(dict(sizes))
        return ("plan", self.keys.info, self.incarnation, held.epoch, held.nonce, step, encoded, action, claim_round)

    def _claim_call(self, held: TrainerEpoch, step: int, task: str, plan: _Plan) -> Command:
        fence = (task_keys(self.run, task).clock, self.incarnation, held.epoch, held.nonce)
        step_groups = sum(plan.sizes.values())
        return ("claim", *fence, step, plan.sizes[task], plan.claim_round, plan.releases, step_groups)

    def _without_manifest(self, tasks: Iterable[str], step: int) -> list[str]:
        names = list(tasks)
        found = self.send_all([("HEXISTS", task_keys(self.run, task).manifest(step), "ids") for task in names])
        return [task for task, exists in zip(names, found, strict=True) if not exists]

    def readiness(self, task: str, step: int) -> Readiness:
        """The groups of a task that a claim of `step` would find, or wait for."""
        return Readiness(*self.call_task("readiness", task, step))

    def preview(self, step: int, sizes: Mapping[str, int]) -> list[ClaimedGroup]:
        """The groups that a claim of `step` would take as things are, at most `sizes[task]` of each task."""
        found = {task: self.call_task("preview", task, step, size) for task, size in sizes.items()}
        return [_claimed_group(task, *fields) for task, reply in found.items() for fields in reply]

    def release(
        self,
        held: TrainerEpoch,
        step: int,
        mode: ReleaseMode,
        *,
        claim_round: int,
        bad: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Give up a claimed batch: back to completed, dropped (counted) or quarantined. Returns its number of groups.

        `claim_round` is that of the `Claimed`, so that a late copy of this call leaves the step's next batch alone.
        `bad`: task -> ids of groups that are quarantined in any mode. Harmless to repeat.
        """
        if step <= held.replayed_through:  # the step is trained anew, with another batch than older trainers had
            self._forget_plans(held, step, step, spared=held.epoch)
        count = self._release(held, self.train_tasks(), step, mode, claim_round, bad or {})
        self._replan(held, step, claim_round, released=True)
        return count

    def _release(
        self,
        held: TrainerEpoch,
        tasks: Iterable[str],
        step: int,
        mode: ReleaseMode,
        up_to_round: int,
        bad: Mapping[str, Sequence[int]],
    ) -> int:
        fence = (held.epoch, held.nonce, step, mode, up_to_round)
        return sum(int(self.call_task("release", task, *fence, *bad.get(task, ()))) for task in tasks)

    def _replan(self, held: TrainerEpoch, step: int, claim_round: int, *, released: bool) -> int:
        """Have a step planned anew; returns its round, that of the plan where it was delivered and not released."""
        fence = (self.keys.info, self.incarnation, held.epoch, held.nonce)
        return int(self.call("replan", *fence, step, claim_round, int(released)))

    def _forget_plans(self, held: TrainerEpoch, first: int, last: int, *, spared: int | None = None) -> None:
        """Drop the plans of steps that a checkpoint covers, or of steps that the epoch `spared` trains anew."""
        fence = (self.keys.info, self.incarnation, held.epoch, held.nonce)
        for start in range(first, last + 1, MAX_IDS_PER_CALL):
            end = min(last, start + MAX_IDS_PER_CALL - 1)
            self.call("forget_plans", *fence, start, end, "" if spared is None else spared)


_FIRST_ROUND = _Plan({}, delivered=False, claim_round=0, releases=0)


def _decode_plan(reply: Any) -> _Plan:
    sizes, delivered, claim_round, releases = reply
    return _Plan(orjson.loads(sizes or b"{}"), bool(delivered), claim_round, releases)


def _decode_claimed(step: int, replies: Mapping[str, Any]) -> Claimed:
    """The batch from the replies to the claims of all its tasks, see `claim.lua`."""
    groups = [_claimed_group(task, *fields) for task, reply in replies.items() for fields in reply[5:]]
    return Claimed(
        step,
        tuple(groups),
        floors={task: Floors.decode(reply[1].decode()) for task, reply in replies.items()},
        token_thresholds={task: int(reply[4]) for task, reply in replies.items()},
        claim_round=max(reply[2] for reply in replies.values()),
        releases=max(reply[3] for reply in replies.values()),
    )


def _claimed_group(
    task: str,
    group_id: int,
    oldest: int,
    arrival: int,
    tries: int,
    tokens: int,
    reward: bytes | None,
    payload: bytes,
    nonce: bytes,
    rows: bytes,
    shaped: bytes,
) -> ClaimedGroup:
    numbers = (oldest, arrival, tries, tokens, float(reward or 0))
    pipeline = _decode_shaped(shaped) if shaped else None
    return ClaimedGroup(task, group_id, *numbers, payload.decode(), nonce.decode(), rows, pipeline)


def _decode_shaped(stored: bytes) -> PipelineOutput:
    fields = orjson.loads(stored)
    return PipelineOutput(tuple(fields["rewards"]), fields["advantages"] and tuple(fields["advantages"]))


def _shortfall(step: int, replies: Mapping[str, Sequence[Any]], wanted: Mapping[str, int]) -> Shortfall:
    """The shortfall from the replies of claims that took nothing, see `claim.lua`."""
    found = {task: Readiness(*numbers) for task, (word, *numbers) in replies.items() if word != b"given_up"}
    short = {task: one for task, one in found.items() if one.ready < wanted[task] or one.stragglers or one.unarchived}
    return Shortfall(
        step,
        ready={task: one.ready for task, one in short.items()},
        wanted={task: wanted[task] for task in short},
        stragglers={task: one.stragglers for task, one in short.items() if one.stragglers},
        unarchived={task: one.unarchived for task, one in short.items() if one.unarchived},
    )
