"""A small world for buffer tests: a run with tasks, hand-made results, and the invariants that must always hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollq.buffer.buffer import Buffer
from rollq.buffer.replies import Claimed, PutOutcome, TrainerEpoch
from rollq.buffer.rollouts import (
    FinishReason,
    GroupResult,
    Lease,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    Status,
    VersionSpan,
)
from rollq.buffer.settings import TaskRules
from rollq.buffer.store.keys import TaskKeys, task_keys

WHOLE = {Status.COMPLETED, Status.GATHERED, Status.COOLING, Status.CLAIMED, Status.ARCHIVED}
"""Groups whose samples are all stored."""


def make_sample(
    version: int, *, epoch: int = 1, reward: float | None = 1.0, tokens: int = 3, status: str = "c"
) -> Sample:
    """A sample whose `tokens` response tokens were all made by one version."""
    segment = Segment(
        prompt_ids=np.array([1, 2], dtype=np.int32),
        response_ids=np.arange(tokens, dtype=np.int32),
        logprobs=np.full(tokens, -0.5, dtype=np.float32),
        versions=(VersionSpan(epoch, version, tokens),),
    )
    return Sample(
        segments=(segment,),
        status=SampleStatus(status),
        finish_reason=FinishReason.STOP if status == "c" else FinishReason.ABORT,
        reward=reward if status == "c" else None,
    )


@dataclass
class World:
    """One run on a real server, seen through one `Buffer`."""

    buffer: Buffer
    held: TrainerEpoch = field(init=False)

    def start(
        self, from_step: int = 0, *, mode: str = "replay", launch_id: str = "launch-1", **rules: dict[str, object]
    ) -> "World":
        """Create run and tasks (`name={rule: value}`), and begin an epoch."""
        self.buffer.create_run()
        for task, given in (rules or {"math": {}}).items():
            self.buffer.register_task(task, TaskRules.model_validate({"batch_groups": 2, "group_size": 2, **given}))
        self.held = self.begin(from_step, mode=mode, launch_id=launch_id)
        return self

    def begin(
        self,
        from_step: int,
        *,
        mode: str = "replay",
        launch_id: str,
        trainer_id: str = "trainer",
        takeover: bool = False,
    ) -> TrainerEpoch:
        self.held = self.buffer.begin_epoch(
            trainer_id=trainer_id, launch_id=launch_id, from_step=from_step, mode=mode,  # type: ignore[arg-type]
            uri=f"file:///weights/{from_step}", digest=f"digest-{launch_id}", takeover=takeover,
        )  # fmt: skip
        return self.held

    def admit(self, n: int, task: str = "math", *, target: int = 1_000_000) -> int:
        """Admit `n` new prompts; returns how many went in."""
        clock = self.buffer.clock(task)
        cursor = int(self.buffer.counts(task).progress["cursor"])
        prompts = [(Prompt(f"{task} {cursor + i}", answer=str(i)), cursor + i + 1) for i in range(n)]
        return self.buffer.admit(task, prompts, epoch=clock.epoch, cursor=cursor, target=target, step=clock.step).count

    def lease(
        self,
        n: int,
        task: str = "math",
        *,
        version: int | None = None,
        worker: str = "worker",
        idle: bool = True,
        suspects_held: int = 0,
    ) -> tuple[Lease, ...]:
        clock = self.buffer.clock(task)
        live = clock.version if version is None else version
        return self.buffer.lease(
            [task], n, worker=worker, version=live, epoch=clock.epoch, idle=idle, suspects_held=suspects_held
        ).leases

    def put(
        self, leases: Sequence[Lease], *, version: int | None = None, epoch: int | None = None, **sample: object
    ) -> list[PutOutcome]:
        """Put completed results for `leases`, all tokens by one version (default: the live one)."""
        results = []
        for lease in leases:
            clock = self.buffer.clock(lease.task)
            made = make_sample(clock.version if version is None else version, epoch=epoch or clock.epoch, **sample)  # type: ignore[arg-type]
            results.append(GroupResult(lease, (made,) * len(lease.samples)))
        return self.buffer.put(results)

    def complete(self, n: int, task: str = "math", *, version: int | None = None) -> None:
        """Take `n` new prompts all the way to completed."""
        assert self.admit(n, task) == n
        assert len(leases := self.lease(n, task)) == n
        assert set(self.put(leases, version=version)) == {PutOutcome.COMPLETED}

    def claim(self, step: int, **sizes: int) -> Claimed:
        claimed = self.buffer.claim(self.held, step, sizes or {"math": 2})
        assert isinstance(claimed, Claimed), claimed
        return claimed

    def train(self, step: int, **sizes: int) -> Claimed:
        """One whole train step: claim, publish, commit."""
        claimed = self.claim(step, **sizes)
        self.buffer.publish(self.held, step, uri=f"file:///weights/{step}", digest=f"digest-{step}")
        self.buffer.commit(self.held, step)
        return claimed

    def statuses(self, task: str = "math") -> dict[str, int]:
        """Groups by status, zeros left out."""
        return {status.value: n for status, n in self.buffer.counts(task).statuses.items() if n}

    def check(self) -> None:
        """Assert what must hold at every moment: conservation, one status per group, indexes that match payloads."""
        for task in self.buffer.tasks():
            check_task(self.buffer, task)


def check_task(buffer: Buffer, task: str) -> None:
    counts = buffer.counts(task)
    assert counts.unaccounted == 0, counts
    keys = task_keys(buffer.run, task)
    client: Any = buffer.client  # the driver's types cover replies of every protocol and mode at once
    by_version, generating, suspects, *by_status = sorted_sets(
        client, [keys.by_version, keys.generating, keys.suspects, *map(keys.status, Status)]
    )
    filed: dict[int, Status] = {}
    for status, ids in zip(Status, by_status, strict=True):
        assert not ids & filed.keys(), f"{ids & filed.keys()} are {status} and something else: {filed}"
        filed |= dict.fromkeys(ids, status)
    stored = stored_groups(client, keys, int(counts.progress["admitted"]))
    assert stored.keys() == filed.keys(), stored.keys() ^ filed.keys()
    for group_id, (group, frames) in stored.items():
        check_group(group_id, filed[group_id], group, frames)
    assert by_version == {id for id, status in filed.items() if status in (Status.COMPLETED, Status.ABORTED)}
    assert generating == {id for id, status in filed.items() if status is Status.RUNNING}
    assert suspects <= {id for id, status in filed.items() if status is Status.PENDING}


def sorted_sets(client: Any, names: Sequence[str]) -> list[set[int]]:
    """Group ids in each of several sorted sets, in one round trip."""
    with client.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.zrange(name, 0, -1)
        return [set(map(int, ids)) for ids in pipeline.execute()]


def stored_groups(client: Any, keys: TaskKeys, admitted: int) -> dict[int, tuple[dict[bytes, bytes], set[int]]]:
    """Group id -> fields of its hash, indexes of its stored samples; without the ids that have neither.

    Ids are given in order of arrival, so all that may exist are known: a scan would read the keys of other tests too.
    """
    ids = range(1, admitted + 1)
    with client.pipeline(transaction=False) as pipeline:
        for group_id in ids:
            pipeline.hgetall(keys.group(group_id)).hkeys(keys.rollout(group_id))
        replies = pipeline.execute()
    found = zip(ids, replies[::2], replies[1::2], strict=True)
    return {group_id: (group, set(map(int, frames))) for group_id, group, frames in found if group or frames}


def check_group(group_id: int, filed: Status, group: Mapping[bytes, bytes], frames: set[int]) -> None:
    """Assert that a group's hash agrees with its index, and that the samples it names are stored."""
    assert group[b"status"] == filed.value.encode(), (group_id, filed, group)
    generated = {i for i, letter in enumerate(group[b"letters"].decode()) if letter != "p"}
    assert frames <= generated, (group_id, frames, group)
    if filed in WHOLE:
        assert frames == generated, (group_id, frames, group)
