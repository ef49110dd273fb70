"""Any sequence of moves of a task, and of one that is offline, against a plain model, with late copies of calls,
replaced trainers and restored snapshots."""

import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, get_args

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollq.buffer.calls.claiming import ReleaseMode
from rollq.buffer.calls.orders import GroupOrder, Refusal
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.leases import Offer, Offered, PutOutcome, SalvageOutcome
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.calls.training import ResumeMode
from rollq.buffer.errors import FencedError, HistoryGone, NotClaimed, StaleWorker
from rollq.buffer.rules.settings import Order
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import (
    FinishedGroup,
    GroupResult,
    Lease,
    Prompt,
    Sample,
    SamplePart,
    SampleStatus,
    Status,
)
from support.buffer_model import Kept, Model, ModelGroup, OfflineModel
from support.buffer_run import World, make_sample, text_of
from support.draw_model import draw, level_of
from support.finished_groups import finished_sample
from support.late_copies import AT_ANY_TIME, RecordingBuffer, name_of

BATCH = 2
ORDERED = {
    GroupOrder.DROP: {Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.ABORTED, Status.EXPIRED, Status.FAILED},
    GroupOrder.REQUEUE: {Status.COMPLETED, Status.FAILED},
    GroupOrder.QUARANTINE: {Status.RUNNING, Status.COMPLETED},
}
"""The statuses of groups that an operator can move."""
OFFLINE = "demos"


class BufferMachine(RuleBasedStateMachine):
    """Drives the tasks of one run; the trainer's and the workers' moves come in any order."""

    url: ClassVar[str]
    moves: ClassVar[int] = 0
    """Moves of all sequences so far."""

    @initialize(order=st.sampled_from(get_args(Order)))
    def begin(self, order: Order) -> None:
        type(self).moves -= 1  # the model is also compared before the first move
        self.buffer = RecordingBuffer.connect(self.url, f"machine-{uuid.uuid4().hex[:12]}")
        rules: dict[str, Any] = {"max_deaths": 50, "max_tries": 1000, "lease_s": 600, "max_uncheckpointed_steps": 4}
        rules |= {"partial_rollout": True, "order": order}
        self.order = order
        self.world = World(self.buffer).start(math=rules, demos={"offline": True, "max_uncheckpointed_steps": 4})
        self.model = Model()
        self.demos = OfflineModel()
        self.lives = 1  # how often the weights took another course
        self.model.begin(self.world.held.epoch, 0, "digest-launch-1")
        self.covered: dict[int, list[int]] = {}
        self.old_leases: list[Lease] = []
        self.launches = 1
        self.replaced: list[TrainerEpoch] = []
        self.made = 0  # tokens that were salvaged; each has a different id
        self.starts = {self.world.held.epoch: 0}  # the step at which each epoch began

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.remove_all()
            self.buffer.close()

    def remove_all(self) -> None:
        if keys := list(self.buffer.client.scan_iter(match=f"rollq:{{{self.buffer.run}*")):
            self.buffer.client.unlink(*keys)

    # -- producers and workers --------------------------------------------------------------------------------------

    @rule(n=st.integers(1, 4), room=st.integers(0, 5))
    def admit(self, n: int, room: int) -> None:
        model = self.model
        busy = len(model.ids(Status.PENDING, Status.RUNNING, Status.COMPLETED, Status.CLAIMED))
        admitted = self.world.admit(n, target=busy + BATCH * self.model.committed + room)
        assert admitted == min(n, room)
        first = len(model.groups) + model.dropped + 1
        for group_id in range(first, first + admitted):
            model.groups[group_id] = ModelGroup()

    def consumed(self) -> int:
        return sum(len(ids) for step, ids in self.all_batches().items() if step <= self.model.committed)

    def all_batches(self) -> dict[int, list[int]]:
        return {**self.covered, **self.model.batches}

    @rule(n=st.integers(1, 4))
    def lease(self, n: int) -> None:
        if self.model.stale(self.model.version, self.model.step):
            with pytest.raises(StaleWorker):
                self.world.lease(n)
            return
        for lease in self.world.lease(n):
            self.model.grant(lease.group_id, lease)
            group = self.model.groups[lease.group_id]
            assert lease.parts == group.parts
            for index, sample in enumerate(lease.samples):
                self.check_kept(sample, group.kept.get(index))

    def check_kept(self, sample: Sample, kept: Kept | None) -> None:
        """A leased sample has what its group keeps of it."""
        ids = [token for segment in sample.segments for token in segment.response_ids.tolist()]
        assert ids == (kept.ids if kept else [])
        if kept:
            assert sample.status is (SampleStatus.COMPLETED if kept.finished else SampleStatus.ABORTED)

    @precondition(lambda self: self.model.ids(Status.RUNNING))
    @rule(data=st.data(), age=st.integers(0, 3))
    def salvage(self, data: st.DataObject, age: int) -> None:
        """Workers keep more tokens of one sample of each group. Finished samples are sent whole."""
        for group_id in self.model.ids(Status.RUNNING):
            index, finished = data.draw(st.integers(0, 1)), data.draw(st.booleans())
            group = self.model.groups[group_id]
            if index not in group.offered | group.lent:
                self.salvage_one(group, index, max(0, self.model.version - age), finished=finished)

    def salvage_one(
        self, group: ModelGroup, index: int, version: int, *, finished: bool, loan: Lease | None = None
    ) -> None:
        if group.parts == 0:
            self.model.count_anew(group, self.world.held.epoch)
        kept = group.kept.get(index, Kept([], version, finished=False))
        if kept.finished:
            return
        made = [self.made + 1, self.made + 2]
        self.made += len(made)
        oldest = min(kept.oldest, version)
        sent = group.lent_parts.setdefault(loan.nonce, []) if loan else group.sent
        number = len(sent) if loan else group.parts - sum(map(len, group.lent_parts.values()))
        if finished:
            part = self.part(group, index, 0, kept.ids + made, oldest, "c")
        else:
            part = self.part(group, index, len(kept.ids), made, version, "a")
        part = replace(part, lease=loan or part.lease, number=number)
        again = [part, *sent]  # those before are repeated
        assert self.buffer.salvage(again) == [SalvageOutcome.KEPT] * len(again)
        group.kept[index] = Kept(kept.ids + made, oldest, finished)
        sent.append(part)
        group.parts += 1

    def part(
        self, group: ModelGroup, index: int, before: int, ids: Sequence[int], version: int, status: str
    ) -> SamplePart:
        """A part with these tokens, all of one version of the live weights."""
        assert group.lease is not None
        made = make_sample(version, epoch=self.world.held.epoch, tokens=len(ids), status=status)
        prompt_ids = np.array([] if before else [1, 2], np.int32)
        segment = replace(made.segments[0], prompt_ids=prompt_ids, response_ids=np.array(ids, np.int32))
        return SamplePart(group.lease, group.parts, index, before, replace(made, segments=(segment,)))

    @precondition(lambda self: self.model.ids(Status.RUNNING))
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        """Workers offer samples, and take back what others have not borrowed."""
        for group_id in self.model.ids(Status.RUNNING):
            group = self.model.groups[group_id]
            assert group.lease is not None
            chosen = data.draw(st.sets(st.integers(0, 1)))
            finished = {index for index, kept in group.kept.items() if kept.finished}
            added, taken_back = chosen - group.offered - group.lent - finished, chosen & group.offered
            offer = Offer(group.lease, group.offer_calls, tuple(added), tuple(taken_back))
            group.offered = (group.offered | added) - taken_back
            group.offer_calls += bool(added or taken_back)
            self.check_offers(group, offer)

    def check_offers(self, group: ModelGroup, offer: Offer) -> None:
        assert self.buffer.offer([offer]) == [Offered(frozenset(group.offered), frozenset(group.lent), group.parts)]

    @rule(n=st.integers(1, 3), age=st.integers(0, 2))
    def borrow(self, n: int, age: int) -> None:
        model, version = self.model, self.model.version - age
        if version < 0:
            return
        able = [g for g in model.ids(Status.RUNNING) if model.groups[g].offered and version >= model.groups[g].began]
        loans = self.buffer.borrow("math", n, worker="another", version=version, epoch=self.world.held.epoch, share=1.0)
        assert sum(len(loan.borrowed) for loan in loans) == min(n, sum(len(model.groups[g].offered) for g in able))
        for loan in loans:
            group = model.groups[loan.group_id]
            assert loan.group_id in able
            assert set(loan.borrowed) <= group.offered
            group.offered -= set(loan.borrowed)
            group.loans[loan.nonce] = loan
            for index in loan.borrowed:
                self.check_kept(loan.samples[index], group.kept.get(index))

    @rule(data=st.data())
    def two_workers_borrow(self, data: st.DataObject) -> None:
        """A stretch that takes the machine to where a group has several loans."""
        self.admit(n=1, room=1)
        self.lease(n=1)
        self.offer(data=data)
        self.borrow(n=1, age=0)
        self.borrow(n=1, age=0)

    @precondition(lambda self: any(group.loans for group in self.model.groups.values()))
    @rule(data=st.data(), age=st.integers(0, 2), finished=st.booleans(), ends=st.booleans())
    def make_what_was_borrowed(self, data: st.DataObject, age: int, finished: bool, ends: bool) -> None:
        groups = [group for group in self.model.groups.values() if group.loans]
        group = data.draw(st.sampled_from(groups))
        loan = data.draw(st.sampled_from(list(group.loans.values())))
        index = data.draw(st.sampled_from(loan.borrowed))
        assert self.buffer.renew([loan]).gone == []
        self.salvage_one(group, index, max(0, self.model.version - age), finished=finished, loan=loan)
        if ends:
            assert self.buffer.end_loans([loan]) == 1
            del group.loans[loan.nonce]
            self.old_leases.append(loan)

    @precondition(lambda self: self.model.ids(Status.RUNNING))
    @rule(data=st.data(), ages=st.tuples(st.integers(0, 3), st.integers(0, 3)), letter=st.sampled_from("ccca"))
    def put(self, data: st.DataObject, ages: tuple[int, int], letter: str) -> None:
        epoch = data.draw(st.sampled_from(list(self.starts)))
        self.put_one(data.draw(st.sampled_from(self.model.ids(Status.RUNNING))), ages, letter, epoch)

    def put_one(self, group_id: int, ages: tuple[int, int], letter: str, epoch: int | None = None) -> None:
        """Samples that were finished earlier are put unchanged. `epoch` is the epoch of the weights that made the other
        samples. Its trainer may have been ahead of the live trainer."""
        group, live = self.model.groups[group_id], self.world.held.epoch
        epoch = epoch or live
        assert group.lease is not None
        samples = []
        for had, age in zip(group.lease.samples, ages, strict=True):
            made_by = self.model.version + age if epoch < live else max(0, self.model.version - age)
            made = make_sample(made_by, epoch=epoch, status=letter, text=text_of(group_id))
            samples.append(had if had.status is SampleStatus.COMPLETED else made)
        spans = [segment.versions[0] for sample in samples for segment in sample.segments]
        made_in = {span.epoch for span in spans}
        group.counted_in = live if len(made_in) > 1 else max(made_in)
        floors = self.model.floors if group.counted_in == live else {}
        counted = [min(span.version, floors.get(span.epoch, span.version)) for span in spans]
        group.oldest = min(counted)
        version = self.model.counted(group_id)
        (outcome,) = self.buffer.put([GroupResult(group.lease, tuple(samples))])
        self.old_leases.append(group.lease)
        group.end_lease()
        group.parts = 0
        group.kept = {
            index: Kept(sample.segments[0].response_ids.tolist(), oldest, sample.status is SampleStatus.COMPLETED)
            for index, (sample, oldest) in enumerate(zip(samples, counted, strict=True))
        }
        if self.model.stale(version, self.model.step):
            self.model.expire(group_id)
        else:
            finished = all(kept.finished for kept in group.kept.values())
            group.status = Status.COMPLETED if finished else Status.ABORTED
        assert outcome.value == group.status.value

    @rule(n=st.integers(2, 4))
    def produce(self, n: int) -> None:
        """A stretch in which all goes well: new prompts, leased and put. Takes the machine to where batches are.

        What was running before goes on: long answers.
        """
        before = set(self.model.ids(Status.RUNNING))
        self.admit(n=n, room=n)
        self.lease(n=n)
        for group_id in set(self.model.ids(Status.RUNNING)) - before:
            self.put_one(group_id, ages=(0, 0), letter="c")
        if not self.demos.waiting:
            self.insert_after(self.demos.inserted, 1)

    @rule(data=st.data(), n=st.integers(1, 3))
    def insert(self, data: st.DataObject, n: int) -> None:
        """An expert's groups arrive, of all sizes; some of them, or all, for the second time."""
        self.insert_after(data.draw(st.integers(0, self.demos.inserted)), n)

    def insert_after(self, after: int, n: int) -> None:
        numbers = range(after + 1, after + n + 1)
        groups = [FinishedGroup(Prompt("demo"), (finished_sample(text=text_of(number)),) * 2) for number in numbers]
        assert self.buffer.insert(OFFLINE, groups, source="expert", after=after) == self.demos.insert(after, n)

    @rule(letter=st.sampled_from("ca"), waits=st.integers(0, 2))
    def a_sample_waits_for_its_siblings(self, letter: str, waits: int) -> None:
        """A stretch that takes the machine to where groups wait to be sampled again while steps are trained."""
        self.admit(n=1, room=1)
        self.lease(n=1)
        if running := self.model.ids(Status.RUNNING):
            self.put_one(running[-1], ages=(2, 0), letter=letter)
        for _ in range(waits):
            self.produce(n=2)
            if self.model.committed - self.model.history < 4:
                self.train(publish=True)
        self.recycle(limit=3)
        self.lease(n=2)

    @rule(data=st.data(), n=st.integers(1, 3), age=st.integers(0, 3))
    def a_worker_dies_and_another_continues(self, data: st.DataObject, n: int, age: int) -> None:
        """A stretch that takes the machine to where groups are leased with what was salvaged of them."""
        self.admit(n=n, room=n)
        self.lease(n=n)
        if running := self.model.ids(Status.RUNNING):
            self.salvage(data=data, age=age)
            self.die(running)
            self.lease(n=n)

    @precondition(lambda self: self.old_leases)
    @rule(data=st.data())
    def put_again_or_too_late(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.old_leases))
        text = text_of(lease.group_id + 1)  # small where the group is large
        sample = make_sample(self.model.version, epoch=self.world.held.epoch, text=text)
        (outcome,) = self.buffer.put([GroupResult(lease, (sample, sample))])
        assert outcome in (PutOutcome.DUPLICATE, PutOutcome.REFUSED)
        parts = [SamplePart(lease, number, 0, 0, sample) for number in range(3)]
        assert self.buffer.salvage(parts) == [SalvageOutcome.REFUSED] * 3
        assert self.buffer.renew([lease]).gone == [lease]
        assert self.buffer.hand_back([lease]) == 0

    @precondition(lambda self: self.model.ids(Status.RUNNING))
    @rule(data=st.data(), counted=st.booleans())
    def hand_back(self, data: st.DataObject, counted: bool) -> None:
        group_id = data.draw(st.sampled_from(self.model.ids(Status.RUNNING)))
        lease = self.model.groups[group_id].lease
        assert lease is not None
        assert self.buffer.hand_back([lease], counted=counted) == 1
        self.old_leases.append(lease)
        self.model.requeue(group_id)

    @precondition(lambda self: self.model.ids(Status.RUNNING))
    @rule(data=st.data())
    def a_worker_dies(self, data: st.DataObject) -> None:
        self.die(data.draw(st.lists(st.sampled_from(self.model.ids(Status.RUNNING)), min_size=1, unique=True)))

    def die(self, dead: Sequence[int]) -> None:
        leases = [lease for group_id in dead if (lease := self.model.groups[group_id].lease) is not None]
        assert len(leases) == len(dead)
        self.world.run_out(leases)
        assert self.buffer.reap("math").requeued == len(dead)
        self.old_leases += leases
        for group_id in dead:
            self.model.requeue(group_id)

    @rule(n=st.integers(1, 3))
    def the_reply_to_a_lease_is_lost(self, n: int) -> None:
        """The worker never learns of its groups. Their lease runs out, which is no death."""
        if self.model.stale(self.model.version, self.model.step):
            return
        epoch, version = self.world.held.epoch, self.model.version
        _, *granted = self.buffer.call_task("lease", "math", "w", uuid.uuid4().hex, epoch, version, n, 0, 1)
        for group_id, attempt, tries, *_ in granted:
            before = self.buffer.inspect("math", group_id)
            self.model.grant(group_id, None)
            self.world.run_out_ids("math", [group_id])
            assert self.buffer.reap("math") == (1, 0, False)
            self.model.requeue(group_id)
            after = self.buffer.inspect("math", group_id)
            assert (after["deaths"], int(after["tries"]), int(after["attempt"])) == (
                before["deaths"],
                tries - 1,
                attempt,
            )

    @rule(limit=st.integers(1, 3))
    def recycle(self, limit: int) -> None:
        pool = self.model.ids(Status.ABORTED, Status.EXPIRED)
        moved = self.buffer.recycle("math", epoch=self.world.held.epoch, target=1_000_000, limit=limit)
        assert moved == min(limit, len(pool))
        keys = task_keys(self.buffer.run, "math")
        client: Any = self.buffer.client
        pending = {int(found) for found in client.zrange(keys.status(Status.PENDING), 0, -1)}
        gone = [group_id for group_id in pool if group_id in pending]
        assert len(gone) == moved
        aborted = [group_id for group_id in pool if self.model.groups[group_id].status is Status.ABORTED]
        assert set(gone) <= set(aborted) or set(aborted) <= set(gone), "aborted groups go first"
        self.model.set_all(gone, Status.PENDING)

    @rule(statuses=st.sampled_from([(Status.COMPLETED, Status.ABORTED), (Status.COMPLETED,), (Status.ABORTED,), ()]))
    def sweep(self, statuses: Sequence[Status]) -> None:
        model = self.model
        stale = model.stale_ids(*statuses)
        assert self.buffer.expire("math", statuses) == len(stale)
        for group_id in stale:
            model.expire(group_id)

    # -- the operator -----------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), order=st.sampled_from(GroupOrder))
    def an_operator_moves_a_group(self, data: st.DataObject, order: GroupOrder) -> None:
        model, group_id = self.model, data.draw(st.sampled_from(sorted(self.model.groups)))
        group = model.groups[group_id]
        allowed = group.status in ORDERED[order]
        before = len(self.buffer.recorded)
        for dry_run in (True, False):
            ordered = self.buffer.order_group("math", group_id, order, dry_run=dry_run)
            assert ordered == (group.status, None if allowed else Refusal.STATUS)
        if not allowed:
            del self.buffer.recorded[before:]  # a late copy of what was refused is carried out where it is allowed
            return
        if group.lease is not None:
            self.old_leases.append(group.lease)
        if order is GroupOrder.DROP:
            model.drop([group_id])
            return
        group.status = Status.PENDING if order is GroupOrder.REQUEUE else Status.FAILED
        group.end_lease()
        if order is GroupOrder.REQUEUE or group.parts:
            group.forget()

    @precondition(lambda self: self.demos.statuses)
    @rule(data=st.data(), order=st.sampled_from(GroupOrder))
    def an_operator_moves_an_inserted_group(self, data: st.DataObject, order: GroupOrder) -> None:
        """It is not sampled again."""
        group_id = data.draw(st.sampled_from(sorted(self.demos.statuses)))
        status, before = self.demos.statuses[group_id], len(self.buffer.recorded)
        ordered = self.buffer.order_group(OFFLINE, group_id, order)
        refusal = Refusal.STATUS if status not in ORDERED[order] else None
        if order is GroupOrder.REQUEUE:
            refusal = refusal or Refusal.UNSAMPLED
        assert ordered == (status, refusal)
        if refusal:
            del self.buffer.recorded[before:]
        else:
            self.demos.move(group_id, None if order is GroupOrder.DROP else Status.FAILED)

    # -- the trainer ------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.model.committed - self.model.history < 4)
    @rule(so_far=st.booleans(), divide=st.booleans())
    def claim(self, so_far: bool = False, divide: bool = False) -> None:
        model, step = self.model, self.model.committed + 1
        if self.order in ("arrival", "priority") and step not in model.batches and not self.demos.has(step):
            self.sweep_before_a_claim(step)
        fresh = [g for g in model.ids(Status.COMPLETED) if not model.stale(model.counted(g), step)]
        running = (model.groups[g] for g in model.ids(Status.RUNNING))
        stragglers = [g for g in running if not model.stale(g.began, step) and model.stale(g.began, step + 1)]
        if self.demos.has(step):
            self.claim_what_was_inserted(step, so_far=so_far)
            return
        got = self.buffer.claim(self.world.held, step, {"math": BATCH}, so_far=so_far)
        if isinstance(got, Claimed):
            self.claim_round = got.claim_round
        if step not in model.batches:
            held = model.filling.get(step, [])
            is_whole = len(held) + len(fresh) >= BATCH and not stragglers
            new = self.first(fresh, BATCH - len(held)) if is_whole else self.sure(fresh, len(held)) if so_far else []
            model.set_all(new, Status.CLAIMED)
            if is_whole:
                model.filling.pop(step, None)
                model.batches[step] = held + new
            else:
                lack = got.lack if isinstance(got, Claimed) else got
                assert lack is not None
                assert lack.ready == {"math": len(held) + len(fresh)}
                assert lack.stragglers == ({"math": len(stragglers)} if stragglers else {})
                assert isinstance(got, Claimed) == (so_far and bool(held + new))
                if held + new:
                    model.filling[step] = held + new
        if isinstance(got, Claimed):
            assert (got.lack is None) == (step in model.batches)
            assert [group.group_id for group in got.groups] == self.model.held(step)
            assert all(not model.stale(group.oldest_version, step) for group in got.groups)
            assert sorted({*got.parts}) == list(got.parts)
            if divide and got.parts[-1:] != (len(got.groups),):
                assert self.buffer.divide(self.world.held, got)

    def claim_what_was_inserted(self, step: int, *, so_far: bool) -> None:
        got = self.buffer.claim(self.world.held, step, {OFFLINE: 1}, so_far=so_far)
        self.demos.claim(step)
        if step not in self.demos.batches:
            assert not isinstance(got, Claimed)
            assert got.ready == {OFFLINE: 0}
            return
        assert isinstance(got, Claimed)
        self.model.batches[step] = []
        self.claim_round = got.claim_round
        assert [(group.task, group.group_id) for group in got.groups] == [(OFFLINE, self.demos.batches[step])]

    def sure(self, fresh: list[int], held: int) -> list[int]:
        """The fresh groups that a batch with `held` groups would have, whichever others are finished before them."""
        if self.order in ("uniform", "priority", "newest"):
            return []
        unfinished = self.model.ids(Status.PENDING, Status.RUNNING, Status.ABORTED, Status.EXPIRED)
        return self.first(fresh, max(0, BATCH - held - len(unfinished)))

    def first(self, fresh: list[int], count: int) -> list[int]:
        """The groups that a batch takes next."""
        model, step = self.model, self.model.committed + 1
        match self.order:
            case "staleness":
                return sorted(fresh, key=lambda g: (model.counted(g), g))[:count]
            case "newest":
                return sorted(fresh, key=lambda g: (-model.counted(g), -g))[:count]
            case "arrival":
                return sorted(fresh)[:count]
            case "uniform":
                in_set = [(0, g) for g in sorted(fresh, key=lambda g: (model.counted(g), g))]
            case "priority":
                in_set = sorted((level_of(model.groups[g].priority), g) for g in fresh)
        return draw(in_set, count, seed=0, task="math", step=step)[0]

    def sweep_before_a_claim(self, step: int) -> None:
        model = self.model
        if any(model.stale(model.counted(g), step) for g in model.ids(Status.COMPLETED, Status.ABORTED)):
            for group_id in model.stale_ids(Status.COMPLETED, Status.ABORTED):
                model.expire(group_id)

    @precondition(lambda self: self.model.groups)
    @rule(data=st.data(), priority=st.floats(0.01, 100))
    def the_trainer_prioritizes(self, data: st.DataObject, priority: float) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.model.groups)), min_size=1, max_size=3))
        chosen = [self.model.groups[group_id] for group_id in ids]
        lives = [group for group in chosen if group.status is not Status.ARCHIVED]
        assert self.buffer.prioritize(self.world.held, "math", dict.fromkeys(ids, priority)) == len(lives)
        for group in lives:
            group.priority = priority

    @precondition(lambda self: self.model.committed + 1 in self.model.filling)
    @rule()
    def a_batch_that_still_fills_is_not_committed(self) -> None:
        with pytest.raises(NotClaimed):
            self.buffer.commit(self.world.held, self.model.committed + 1)

    @rule(n=st.integers(1, 2))
    def all_but_some_are_finished(self, n: int) -> None:
        """Takes the machine to where a batch is started before it is whole."""
        self.drop_what_waits()
        self.admit(n=n, room=n)
        self.lease(n=4)
        for group_id in self.model.ids(Status.RUNNING)[:-1]:
            self.put_one(group_id, ages=(0, 0), letter="c")
        if self.model.committed - self.model.history < 4:
            self.claim(so_far=True, divide=True)

    def drop_what_waits(self) -> None:
        """What waits is dropped by hand, so that few groups are under way."""
        for group_id in self.model.ids(Status.PENDING, Status.ABORTED, Status.EXPIRED):
            self.buffer.order_group("math", group_id, GroupOrder.DROP)
            self.model.drop([group_id])

    @precondition(lambda self: self.model.committed - self.model.history < 4)
    @rule(publish=st.booleans())
    def train(self, publish: bool) -> None:
        """A whole step, when a batch is ready."""
        self.claim()
        if self.model.committed + 1 in self.model.batches:
            if publish and self.model.version < self.model.committed + 1:
                self.publish()
            self.commit(again=False)

    @precondition(lambda self: self.model.committed + 1 in self.model.batches)
    @rule(again=st.booleans())
    def commit(self, again: bool) -> None:
        model, step = self.model, self.model.committed + 1
        self.buffer.commit(self.world.held, step)
        if again:
            self.buffer.commit(self.world.held, step)
        model.committed = step
        model.step = max(model.step, step + 1)
        model.set_all(model.batches[step], Status.ARCHIVED)
        self.demos.commit(step)
        model.trained += [(step, group_id) for group_id in model.batches[step]]
        assert len({group_id for _, group_id in model.trained}) == len(model.trained), "trained twice"

    @precondition(lambda self: self.is_held(self.model.committed + 1))
    @rule(mode=st.sampled_from(["return", "drop", "quarantine"]))
    def release(self, mode: ReleaseMode) -> None:
        if self.model.committed - self.model.history < 4:
            self.claim(so_far=True)
        model, step = self.model, self.model.committed + 1
        ids = model.held(step)
        model.batches.pop(step, None)
        model.filling.pop(step, None)
        status = {"return": Status.COMPLETED, "quarantine": Status.FAILED}.get(mode)
        count = len(ids) + self.demos.release(step, status)
        assert self.buffer.release(self.world.held, step, mode, claim_round=self.claim_round) == count
        if status is None:
            model.drop(ids)
        else:
            model.set_all(ids, status)

    def is_held(self, step: int) -> bool:
        return bool(self.model.held(step)) or step in self.demos.batches

    @precondition(lambda self: self.model.version < self.model.committed + 1)
    @rule()
    def publish(self) -> None:
        """The weights after the batch that is being trained, or after the last one."""
        model = self.model
        version = max(model.version + 1, model.committed)
        digest = sha256(f"{self.lives}:{version}".encode()).hexdigest()
        self.buffer.publish(self.world.held, version, uri="u", digest=digest)
        model.publish(self.world.held.epoch, version, digest)
        model.step = max(model.step, model.version + 1)

    @rule()
    def the_weights_take_another_course(self) -> None:
        """From now on, the trainer makes other weights than those that were recorded."""
        self.lives += 1

    @precondition(lambda self: self.model.committed > self.model.history)
    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        model = self.model
        step = data.draw(st.integers(model.history, model.committed))
        self.buffer.checkpoint(self.world.held, step)
        for covered in [s for s in model.batches if s <= step]:
            self.covered[covered] = model.batches.pop(covered)
            model.drop(self.covered[covered])
        self.demos.checkpoint(step)
        model.history = step

    @rule(data=st.data(), mode=st.sampled_from(["replay", "return", "regenerate"]))
    def the_trainer_restarts(self, data: st.DataObject, mode: ResumeMode) -> None:
        model = self.model
        from_step = data.draw(st.integers(model.history, model.committed))
        self.launches += 1
        self.replaced.append(self.world.held)
        self.world.begin(from_step, mode=mode, launch_id=f"launch-{self.launches}")
        self.starts[self.world.held.epoch] = from_step
        model.begin(self.world.held.epoch, from_step, f"digest-launch-{self.launches}")
        self.demos.rewind(from_step, replays=mode == "replay")
        after = [step for step in {**model.batches, **model.filling} if step > from_step]
        for step in after:
            ids = model.held(step)
            if mode == "replay":
                model.set_all(ids, Status.CLAIMED)
                continue
            model.set_all(ids, Status.COMPLETED if mode == "return" else Status.PENDING)
            for group_id in ids if mode == "regenerate" else []:
                model.groups[group_id].forget()
            model.batches.pop(step, None)
            model.filling.pop(step, None)
        model.trained = [(step, group_id) for step, group_id in model.trained if step <= from_step]
        model.committed, model.step = from_step, from_step + 1

    @rule(data=st.data(), differs=st.booleans(), restarts=st.integers(1, 2))
    def a_restarted_trainer_trains_the_same_steps_again(
        self, data: st.DataObject, differs: bool, restarts: int
    ) -> None:
        """A stretch that takes the machine to where weights are published again, or others in their place."""
        for _ in range(restarts):
            last = self.model.version
            self.the_trainer_restarts(data=data, mode="replay")
            if differs:
                self.the_weights_take_another_course()
            while self.model.version < last and self.model.committed + 1 in self.model.batches:
                self.train(publish=True)
                if running := self.model.ids(Status.RUNNING):
                    self.put_one(
                        running[0], ages=(2, 2), letter="c", epoch=data.draw(st.sampled_from(list(self.starts)))
                    )

    @rule(data=st.data(), mode=st.sampled_from(["replay", "return", "regenerate"]))
    def the_run_is_lost_and_restored(self, data: st.DataObject, mode: ResumeMode) -> None:
        """Workers die, and the run is saved before all is lost. Nobody of its former life is known to the new one."""
        if running := self.model.ids(Status.RUNNING):
            self.die(running)
        with tempfile.TemporaryDirectory() as folder:
            self.buffer.save(Path(folder) / "saved")
            self.remove_all()
            self.buffer.restore(Path(folder) / "saved")
        self.model.forget_published()
        self.the_trainer_restarts(data=data, mode=mode)
        self.old_leases, self.replaced = [], []

    @precondition(lambda self: self.replaced)
    @rule(data=st.data())
    def a_replaced_trainer_tries(self, data: st.DataObject) -> None:
        old, step = data.draw(st.sampled_from(self.replaced)), data.draw(st.integers(1, 6))
        calls: list[Callable[[], object]] = [
            lambda: self.buffer.claim(old, step, {"math": BATCH}),
            lambda: self.buffer.commit(old, step),
            lambda: self.buffer.prioritize(old, "math", {1: 2.0}),
            lambda: self.buffer.release(old, step, "drop", claim_round=0),
            lambda: self.buffer.publish(old, step, uri="u", digest="rival"),
            lambda: self.buffer.checkpoint(old, step),
            lambda: self.world.buffer.begin_epoch(
                trainer_id="trainer", launch_id=old.launch_id, from_step=0, uri="u", digest="rival", takeover=True
            ),
        ]
        with pytest.raises((FencedError, HistoryGone)):
            data.draw(st.sampled_from(calls))()

    # -- the network ------------------------------------------------------------------------------------------------

    @rule()
    def the_server_loses_its_functions(self) -> None:
        self.buffer.client.function_flush()

    @rule(data=st.data())
    def a_late_copy_of_a_call_arrives(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from([call for call in self.buffer.recorded if name_of(call) not in AT_ANY_TIME]))
        self.buffer.arrive_again(copy)
        if name_of(copy) == "claim" and self.model.committed - self.model.history < 4:
            self.claim(so_far=copy[-2] == 1)  # one that came up short may take what is there now

    # -- always -----------------------------------------------------------------------------------------------------

    @invariant()
    def every_group_is_where_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        type(self).moves += 1
        counts = self.buffer.counts("math")
        for status in Status:
            assert counts.statuses[status] == len(self.model.ids(status)), status
        assert counts.ready == self.ready()
        assert (counts.clock.step, counts.clock.version, counts.clock.committed) == (
            self.model.step,
            self.model.version,
            self.model.committed,
        )
        assert counts.progress["consumed"] == self.consumed()
        found = {status: n for status, n in self.buffer.counts(OFFLINE).statuses.items() if n}
        assert found == Counter(self.demos.statuses.values())
        self.world.check()

    def ready(self) -> int:
        model = self.model
        completed, stale = len(model.ids(Status.COMPLETED)), len(model.stale_ids(Status.COMPLETED))
        if self.order in ("arrival", "priority"):  # stale ones that are not swept yet count, whatever their status
            stale += len(model.stale_ids(Status.ABORTED))
        return max(0, completed - stale)


def run_machine(url: str, *, examples: int, seed: int | None = None) -> int:
    """Check `examples` sequences of up to 50 moves on the server at `url`; returns how many moves there were.

    Without a seed, they are always the same ones.
    """
    made: Any = type("Machine", (BufferMachine,), {"url": url})
    machine = made if seed is None else hypothesis.seed(seed)(made)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            deadline=None,
            derandomize=seed is None,
            database=None,
            phases=[Phase.generate],  # shrinking would repeat a failure on the server for minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
    return int(made.moves)
