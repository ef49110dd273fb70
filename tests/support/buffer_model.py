"""A plain model of one task: what the buffer should hold after any sequence of moves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rollq.buffer.values.rollouts import Lease, SamplePart, Status

THRESHOLD = 2
NEWEST = 1_000_000
"""A version that no token is newer than."""


@dataclass
class Kept:
    """What a group keeps of a sample that is still being made, or waits for the rest of its group."""

    ids: list[int]
    oldest: int  # as it was in the epoch that its group was counted in
    finished: bool


@dataclass
class ModelGroup:
    status: Status = Status.PENDING
    oldest: int = -1  # as it was in the epoch that it was counted in
    counted_in: int = 0
    began: int = -1  # the version that its lease was given for
    priority: float = 1.0
    lease: Lease | None = None
    kept: dict[int, Kept] = field(default_factory=dict)  # by the index of the sample
    parts: int = 0
    sent: list[SamplePart] = field(default_factory=list)  # with its lease
    offered: set[int] = field(default_factory=set)
    offer_calls: int = 0
    loans: dict[str, Lease] = field(default_factory=dict)  # by nonce
    lent_parts: dict[str, list[SamplePart]] = field(
        default_factory=dict
    )  # by nonce, those of loans that have ended too

    @property
    def lent(self) -> set[int]:
        """The indices of the samples that are lent."""
        return {index for loan in self.loans.values() for index in loan.borrowed}

    def forget(self) -> None:
        """Nothing is left but the prompt."""
        self.kept, self.parts, self.priority = {}, 0, 1.0

    def end_lease(self) -> None:
        """Its worker has put it, or has lost it: offers and loans end with the lease."""
        self.lease, self.sent, self.offered, self.offer_calls, self.loans, self.lent_parts = None, [], set(), 0, {}, {}


@dataclass
class OfflineModel:
    """A task that is offline: its groups never age, and one of them is the whole batch of every third step."""

    statuses: dict[int, Status] = field(default_factory=dict)
    inserted: int = 0
    batches: dict[int, int] = field(default_factory=dict)  # step -> its group

    @staticmethod
    def has(step: int) -> bool:
        """Whether the batch of a step is one of its groups."""
        return step % 3 == 0

    @property
    def waiting(self) -> list[int]:
        return sorted(group_id for group_id, status in self.statuses.items() if status is Status.COMPLETED)

    def insert(self, after: int, count: int) -> int:
        """Returns how many are new."""
        new = range(self.inserted + 1, after + count + 1)
        self.statuses |= dict.fromkeys(new, Status.COMPLETED)
        self.inserted += len(new)
        return len(new)

    def claim(self, step: int) -> None:
        """The first group that waits, if there is one, unless the batch was claimed before."""
        if step not in self.batches and self.waiting:
            self.batches[step] = self.waiting[0]
            self.statuses[self.batches[step]] = Status.CLAIMED

    def commit(self, step: int) -> None:
        if step in self.batches:
            self.statuses[self.batches[step]] = Status.ARCHIVED

    def release(self, step: int, status: Status | None) -> int:
        """Returns how many groups the batch has given up; None: they are dropped."""
        group_id = self.batches.pop(step, None)
        if group_id is None:
            return 0
        self.move(group_id, status)
        return 1

    def move(self, group_id: int, status: Status | None) -> None:
        if status is None:
            del self.statuses[group_id]
        else:
            self.statuses[group_id] = status

    def checkpoint(self, step: int) -> None:
        for covered in [at for at in self.batches if at <= step]:
            del self.statuses[self.batches.pop(covered)]

    def rewind(self, from_step: int, *, replays: bool) -> None:
        """Nobody would sample its groups again, so that they wait where others are to be regenerated."""
        for step in [at for at in self.batches if at > from_step]:
            if replays:
                self.statuses[self.batches[step]] = Status.CLAIMED
            else:
                self.release(step, Status.COMPLETED)


@dataclass
class Model:
    """What the buffer should hold, in the simplest terms."""

    groups: dict[int, ModelGroup] = field(default_factory=dict)
    dropped: int = 0
    step: int = 1
    version: int = 0
    committed: int = 0
    history: int = 0
    batches: dict[int, list[int]] = field(default_factory=dict)  # an empty one is of the task that is offline
    filling: dict[int, list[int]] = field(default_factory=dict)  # batches that are not whole yet
    trained: list[tuple[int, int]] = field(default_factory=list)  # (step, group) of this history of weights
    floors: dict[int, int] = field(default_factory=dict)  # of each dead epoch
    published: dict[int, dict[int, str]] = field(default_factory=dict)  # epoch -> version -> digest

    def ids(self, *statuses: Status) -> list[int]:
        return [group_id for group_id, group in self.groups.items() if group.status in statuses]

    def stale(self, oldest: int, step: int) -> bool:
        return step - oldest - 1 >= THRESHOLD

    def counted(self, group_id: int) -> int:
        """The version that a group counts as now."""
        group = self.groups[group_id]
        return min(group.oldest, self.floors.get(group.counted_in, group.oldest))

    def stale_ids(self, *statuses: Status) -> list[int]:
        return [group_id for group_id in self.ids(*statuses) if self.stale(self.counted(group_id), self.step)]

    def begin(self, epoch: int, from_step: int, digest: str) -> None:
        """What was made after `from_step` counts as of it, until its weights are published again."""
        for dead in self.published:
            self.floors[dead] = min(self.floors.get(dead, from_step), from_step)
        self.published[epoch] = {from_step: digest}
        self.version = from_step

    def publish(self, epoch: int, version: int, digest: str) -> None:
        """Epochs agree with the live one up to the last version that all since them have published alike."""
        self.published[epoch][version] = digest
        since = epoch
        for earlier in sorted(self.published, reverse=True):
            if self.published[earlier].get(version, digest) != digest:
                break
            since = earlier if version in self.published[earlier] else since
        for dead, floor in self.floors.items():
            if dead >= since and floor == self.version:
                self.floors[dead] = version
        self.version = version

    def forget_published(self) -> None:
        """Nobody knows any more which weights the epochs so far have published."""
        self.published = {epoch: {} for epoch in self.published}

    def set_all(self, ids: Sequence[int], status: Status) -> None:
        for group_id in ids:
            self.groups[group_id].status = status

    def requeue(self, group_id: int) -> None:
        """A lease ends without a result."""
        group = self.groups[group_id]
        group.status = Status.PENDING
        group.end_lease()
        self.age(group, self.step - 1 - THRESHOLD)

    def grant(self, group_id: int, lease: Lease | None) -> None:
        """A group is leased for the live weights, with what it keeps and the next batch would not find too old."""
        group = self.groups[group_id]
        assert group.status is Status.PENDING
        step = self.step + bool(self.batches.get(self.step))
        oldest = self.age(group, min(step - 1 - THRESHOLD, self.version - 1))
        group.status, group.lease, group.began = Status.RUNNING, lease, min(oldest, self.version)

    def age(self, group: ModelGroup, too_old: int) -> int:
        """What a group keeps is dropped if it is too old, however long it has waited. Returns its oldest version."""
        floor = self.floors.get(group.counted_in, NEWEST)
        cap = NEWEST if floor == self.version else floor  # it may rise with the next version
        group.kept = {index: kept for index, kept in group.kept.items() if min(kept.oldest, cap) > too_old}
        if not group.kept:
            group.parts = 0
        return min((min(kept.oldest, cap) for kept in group.kept.values()), default=NEWEST)

    def count_anew(self, group: ModelGroup, epoch: int) -> None:
        """What a group keeps counts as it does in the live `epoch`, for good."""
        for kept in group.kept.values():
            kept.oldest = min(kept.oldest, self.floors.get(group.counted_in, NEWEST))
        group.counted_in = epoch

    def expire(self, group_id: int) -> None:
        """A group loses its samples that are too old."""
        group = self.groups[group_id]
        group.status, group.priority = Status.EXPIRED, 1.0
        cap = self.floors.get(group.counted_in, NEWEST)
        group.kept = {i: kept for i, kept in group.kept.items() if not self.stale(min(kept.oldest, cap), self.step)}

    def held(self, step: int) -> list[int]:
        """The groups of a batch, whole or not."""
        return self.batches.get(step) or self.filling.get(step, [])

    def drop(self, ids: Sequence[int]) -> None:
        for group_id in ids:
            del self.groups[group_id]
            self.dropped += 1
