"""Batches of train steps: claimed from completed groups, and released.

Nothing is atomic across tasks, so a step with several tasks is planned first. The plan fixes the step's group count per
task, and decides between ranks that deliver the batch and ranks that undo it because a task came up short.

A batch may be claimed while it fills (`so_far`). Its tasks then grow one by one, and the plan fixes the parts that
ranks train.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import orjson

from rollq.buffer.calls.claim_replies import (
    FIRST_ROUND,
    Asked,
    Plan,
    claimed_group,
    decode_claimed,
    decode_plan,
    has_groups,
    shortfall_of,
)
from rollq.buffer.calls.replies.claims import Claimed, ClaimedGroup, Readiness, Shortfall
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.calls.sweeping import MAX_IDS_PER_CALL, Sweeping
from rollq.buffer.errors import ConfigError
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.pipelining import Command

MOST_FRAME_BYTES = 256 << 10
"""The most bytes of prompts and frames sent with each task's claim: more would keep the server busy."""
ReleaseMode = Literal["return", "drop", "quarantine"]


class Claiming(Sweeping):
    """The trainer's calls that take batches and give them back; any rank may claim."""

    def claim(
        self,
        held: TrainerEpoch,
        step: int,
        sizes: Mapping[str, int],
        *,
        short_ok: bool = False,
        so_far: bool = False,
        known: Claimed | None = None,
        seed: int = 0,
        frame_bytes: int = MOST_FRAME_BYTES,
    ) -> Claimed | Shortfall:
        """Return the batch of `step` with `sizes[task]` groups of each task, or its shortfall. Does not wait.

        The first outcome is stored: until the batch is released, later calls return the same batch, on any rank and
        after any crash. The step is claimed for all tasks or for none; with `short_ok`, a short task contributes the
        groups that it has.

        With `so_far`, a short batch starts with groups that the full batch will have: see `Claimed.lack`. Later calls
        return these groups too, with or without `so_far`. `known` is the last such call's result; its groups are not
        read again. `seed`, the step and the completed groups determine draws. `frame_bytes` limits the prompts and
        frames sent with the groups, which `fetch` need not read; 0 suits a caller that fetches few of the groups.
        Raises `FencedError`, `HistoryGone`, `CheckpointOverdue`, `ConfigError`.
        """
        if not sizes:
            raise ConfigError("a batch needs a task: name its tasks and their groups")
        for task, size in sizes.items():
            if not 0 <= size <= MAX_IDS_PER_CALL:
                raise ConfigError(f"task {task!r}: a batch of {size} groups; 0 to {MAX_IDS_PER_CALL} are possible")
        asked = Asked(so_far, known, seed, frame_bytes)
        while True:
            if short_ok:
                sizes = self._sizes_at_hand(held, step, sizes)
            claim = self._claim_single if len(sizes) == 1 else self._claim_together
            outcome = claim(held, step, sizes, asked)
            if outcome is not None:
                return outcome
            asked = asked._replace(known=None)  # not the known batch

    def divide(self, held: TrainerEpoch, claimed: Claimed) -> bool:
        """Make the batch's next part from its groups that are in no part yet, for every rank and trainer.

        The first caller decides: the next claim returns the part, which another rank may have made smaller or larger.
        Returns False if the batch has been released. Raises `FencedError`.
        """
        groups = dict.fromkeys(claimed.planned, 0)
        for group in claimed.groups:
            groups[group.task] += 1
        fence = (self.keys.info, self.incarnation, held.epoch, held.nonce)
        number, encoded = len(claimed.parts), orjson.dumps(groups)
        return bool(self.call("divide", *fence, claimed.step, claimed.plan_round, number, encoded))

    def _sizes_at_hand(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> dict[str, int]:
        """The sizes, limited to the number of ready groups."""
        claim_round = self.send("HGET", self.keys.plan(step), "round")
        if claim_round is not None and len(self._without_manifest(sizes, step)) == len(sizes):
            self._replan(held, step, int(claim_round), released=False)  # a claim wanted more
        return {task: min(size, self.readiness(task, step).ready) for task, size in sizes.items()}

    def _claim_single(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], asked: Asked
    ) -> Claimed | Shortfall | None:
        """Plan and claim a step of one task in one round trip, since such a step cannot be torn."""
        (task,) = sizes
        planned, reply = self.call_all(
            [
                self._plan_call(held, step, sizes, "look", 0),
                self._claim_call(held, step, task, FIRST_ROUND._replace(sizes=dict(sizes)), asked),
            ]
        )
        plan = self._planned(held, step, sizes, decode_plan(planned))
        if plan.sizes.keys() != sizes.keys():  # an earlier call planned the step with other tasks
            return self._claim_together(held, step, plan.sizes, asked)
        if reply[0] == b"given_up" and plan.claim_round > 0:  # the batch of the first round
            (reply,) = self.call_all([self._claim_call(held, step, task, plan, asked)])
        reply = self._swept(held, step, task, plan, reply, asked)
        if not has_groups(reply):
            return shortfall_of(step, {task: reply}, plan.sizes)
        return decode_claimed(step, {task: reply}, plan, asked.known)

    def _claim_together(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], asked: Asked
    ) -> Claimed | Shortfall | None:
        """Claim a step of several tasks; None if another rank undoes or delivers the claim first."""
        plan = self._planned(held, step, sizes, self._settle(held, step, sizes, "look", 0))
        if asked.so_far:
            return self._claim_so_far(held, step, plan, asked)
        if shortfall := self._look(step, plan):
            return shortfall
        replies: dict[str, Any] = {}
        for task in plan.sizes:
            (reply,) = self.call_all([self._claim_call(held, step, task, plan, asked)])
            reply = self._swept(held, step, task, plan, reply, asked)
            if reply[0] == b"given_up":
                return shortfall_of(step, {task: reply}, plan.sizes)
            if reply[0] != b"batch":
                # part of the batch may have been trained: other ranks wait for the rest
                is_over = plan.delivered or self._undo(held, step, plan)
                return shortfall_of(step, {task: reply}, plan.sizes) if is_over else None
            replies[task] = reply
        # a rank that undoes and a rank that delivers ask for the same plan: only one of them succeeds
        if not plan.delivered:
            plan = self._settle(held, step, plan.sizes, "deliver", plan.claim_round)
        # another rank may have delivered a later round, and this rank may have seen only a part of it or nothing
        is_whole = all(reply[2] == plan.claim_round for reply in replies.values())
        return decode_claimed(step, replies, plan, None) if plan.delivered and is_whole else None

    def _claim_so_far(self, held: TrainerEpoch, step: int, plan: Plan, asked: Asked) -> Claimed | Shortfall | None:
        """Claim the groups of a step with several tasks that are ready so far, in parts or not."""
        calls = [self._claim_call(held, step, task, plan, asked) for task in plan.sizes]
        replies = {
            task: self._swept(held, step, task, plan, reply, asked)
            for task, reply in zip(plan.sizes, self.call_all(calls), strict=True)
        }
        if any(reply[0] == b"given_up" for reply in replies.values()) or not any(map(has_groups, replies.values())):
            return shortfall_of(step, replies, plan.sizes)
        return decode_claimed(step, replies, plan, asked.known)

    def _look(self, step: int, plan: Plan) -> Shortfall | None:
        """Determine the step's shortfall without claiming, so that claims are rarely torn."""
        missing = self._without_manifest(plan.sizes, step)
        if len(missing) < 2:
            return None
        short = {task: (b"short", *self.readiness(task, step)) for task in missing if plan.sizes[task]}
        shortfall = shortfall_of(step, short, plan.sizes)
        return shortfall if shortfall.wanted else None

    def _undo(self, held: TrainerEpoch, step: int, plan: Plan) -> bool:
        """Release a torn step's claimed groups; returns False if another rank has delivered the step."""
        if self._settle(held, step, plan.sizes, "undo", plan.claim_round).delivered:
            return False
        self._release(held, plan.sizes, step, "return", plan.claim_round, {})
        return True

    def _swept(self, held: TrainerEpoch, step: int, task: str, plan: Plan, reply: Any, asked: Asked) -> Any:
        """Repeat a claim while stale groups are in the way; returns the last reply."""
        while reply[0] == b"sweep" and self.expire(task):
            (reply,) = self.call_all([self._claim_call(held, step, task, plan, asked)])
        return reply

    def plan_anew(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int]) -> bool:
        """Let the next claim of `step` take `sizes`, if its plan differs for a task and none of its groups is claimed.

        Rank 0 calls this if rules change while its claim waits for groups. Returns whether the step has a new plan.
        Raises `FencedError`.
        """
        plan = self._planned(held, step, sizes, self._settle(held, step, sizes, "look", 0))
        wanted = {task: sizes.get(task, groups) for task, groups in plan.sizes.items()}  # new tasks join later
        if plan.delivered or wanted == plan.sizes or len(self._without_manifest(plan.sizes, step)) < len(plan.sizes):
            return False
        if len(plan.sizes) == 1:  # it is claimed with the sizes of the call
            return False
        if self._replan(held, step, plan.claim_round, released=False) <= plan.claim_round:
            return False  # another rank has delivered it
        self._release(held, plan.sizes, step, "return", plan.claim_round, {})  # groups that another rank has claimed
        return True

    def _planned(self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], plan: Plan) -> Plan:
        """The plan, made with `sizes` if no rank has planned the current round yet."""
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
    ) -> Plan:
        """Read a step's plan, or deliver or undo a round's claims; returns the decision, which any rank may have
        made."""
        return decode_plan(self.call(*self._plan_call(held, step, sizes, action, claim_round)))

    def _plan_call(
        self, held: TrainerEpoch, step: int, sizes: Mapping[str, int], action: str, claim_round: int
    ) -> Command:
        encoded = orjson.dumps(dict(sizes))
        return ("plan", self.keys.info, self.incarnation, held.epoch, held.nonce, step, encoded, action, claim_round)

    def _claim_call(self, held: TrainerEpoch, step: int, task: str, plan: Plan, asked: Asked) -> Command:
        fence = (task_keys(self.run, task).clock, self.incarnation, held.epoch, held.nonce)
        planned = (plan.sizes[task], plan.claim_round, plan.releases, sum(plan.sizes.values()))
        return ("claim", *fence, step, *planned, asked.seed, int(asked.so_far), asked.known_of(task), asked.most_bytes)

    def _without_manifest(self, tasks: Iterable[str], step: int) -> list[str]:
        names = list(tasks)
        have_one = self.send_all([("HEXISTS", task_keys(self.run, task).manifest(step), "ids") for task in names])
        return [task for task, exists in zip(names, have_one, strict=True) if not exists]

    def readiness(self, task: str, step: int) -> Readiness:
        """The number of a task's groups that a claim of `step` would find or wait for."""
        return Readiness(*self.call_task("readiness", task, step))

    def preview(self, step: int, sizes: Mapping[str, int], *, seed: int = 0) -> list[ClaimedGroup]:
        """The groups that a claim of `step` would take now, at most `sizes[task]` of each task."""
        by_task = {task: self.call_task("preview", task, step, size, seed) for task, size in sizes.items()}
        return [claimed_group(task, *fields) for task, reply in by_task.items() for fields in reply]

    def prioritize(self, held: TrainerEpoch, task: str, priorities: Mapping[int, float]) -> int:
        """Change the priorities of a task's groups, by group id; a trained group's copy takes the group's priority.

        Returns how many of the groups may still be trained. Raises `FencedError`, and `ConfigError` for a priority that
        is not a finite number above 0.
        """
        for group_id, priority in priorities.items():
            if not 0 < priority < math.inf:
                raise ConfigError(f"group {group_id}: priority {priority}: must be above 0 and finite")
        pairs = [value for item in priorities.items() for value in item]
        count = 0
        for at in range(0, len(pairs), 2 * MAX_IDS_PER_CALL):
            count += self._prioritize(held, task, pairs[at : at + 2 * MAX_IDS_PER_CALL])
        return count

    def _prioritize(self, held: TrainerEpoch, task: str, pairs: Sequence[float]) -> int:
        while True:
            calls = int(self.send("HGET", task_keys(self.run, task).progress, "prioritized") or 0)
            count = int(self.call_task("prioritize", task, held.epoch, held.nonce, calls, *pairs))
            if count >= 0:
                return count

    def release(
        self,
        held: TrainerEpoch,
        step: int,
        mode: ReleaseMode,
        *,
        claim_round: int,
        bad: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Give up a claimed batch; its groups are completed again, dropped (counted) or quarantined. Returns how many.

        `claim_round` is the round of the `Claimed`, so a late copy of this call leaves the step's next batch alone.
        `bad` maps tasks to the ids of groups to quarantine in any mode. Harmless to repeat.
        """
        if step <= held.replayed_through:  # the step is trained again, with a different batch
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
        """Forget a step's plan. Returns the new round, or the old one if its batch was delivered and not released."""
        fence = (self.keys.info, self.incarnation, held.epoch, held.nonce)
        return int(self.call("replan", *fence, step, claim_round, int(released)))

    def _forget_plans(self, held: TrainerEpoch, first: int, last: int, *, spared: int | None = None) -> None:
        """Drop the plans of steps that a checkpoint covers or that the epoch `spared` trains again."""
        fence = (self.keys.info, self.incarnation, held.epoch, held.nonce)
        for start in range(first, last + 1, MAX_IDS_PER_CALL):
            end = min(last, start + MAX_IDS_PER_CALL - 1)
            self.call("forget_plans", *fence, start, end, "" if spared is None else spared)
