"""A small world for buffer tests: a run with tasks, hand-made results, and the invariants that must always hold."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.payload_removal import AUDIT_PAUSE_S, Audit
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.rules.settings import PayloadSettings, TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
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
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from support.invariants import check_task

OUTSIDE_BYTES = 2 * MOST_INLINE_BYTES
"""Frames of this size are kept outside of the servers, where a run has a store for them."""


def text_of(group_id: int) -> str:
    """The text of a group's samples. That of even groups makes them large: their frame is a separate key, and that of
    every other one of these is outside of the servers, if the run has a store for it."""
    return "" if group_id % 2 else "x" * (OUTSIDE_BYTES if group_id % 4 == 0 else MOST_INLINE_BYTES + 1)


def payloads_of(buffer: Buffer, task: str) -> dict[int, str]:
    """What each group of a task names as its payload."""
    ids = range(1, int(buffer.counts(task).progress["admitted"]) + 1)
    keys = task_keys(buffer.run, task)
    found = buffer.send_all([("HGET", keys.group(group_id), "payload") for group_id in ids])
    return {group_id: name.decode() for group_id, name in zip(ids, found, strict=True) if name}


def payloads_in(folder: Path) -> PayloadSettings:
    """Settings with which frames of `OUTSIDE_BYTES` and more are in a folder, which is made."""
    folder.mkdir(exist_ok=True)
    return PayloadSettings(url=str(folder), min_bytes=OUTSIDE_BYTES)


def make_sample(
    version: int, *, epoch: int = 1, reward: float | None = 1.0, tokens: int = 3, status: str = "c", text: str = ""
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
        text=text,
        failure=FailureKind.GRADER if status == "f" else None,
    )


def set_clock(buffer: Buffer, task: str, **fields: object) -> None:
    """Set fields of a task's clock, as another server might have done: with a revision that no server has given."""
    mapping = {**fields, "revision": f"test-{uuid.uuid4().hex}"}
    buffer.client.hset(task_keys(buffer.run, task).clock, mapping=mapping)  # type: ignore[arg-type]


def let_go(world: "World") -> None:
    """As if the roles of a run had ended long ago."""
    world.buffer.client.hset(world.buffer.keys.trainer, "deadline_ms", 1)
    world.buffer.client.delete(world.buffer.keys.workers)
    for task in world.buffer.tasks():
        set_clock(world.buffer, task, reaped_ms=1)


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
        accept_new_store: bool = True,
    ) -> TrainerEpoch:
        """Take the run, at any step. `trainer` takes over from itself, as if its process had died."""
        takeover = takeover or trainer_id == "trainer"
        self.held = self.buffer.begin_epoch(
            trainer_id=trainer_id, launch_id=launch_id, from_step=from_step, mode=mode,  # type: ignore[arg-type]
            uri=f"file:///weights/{from_step}", digest=f"digest-{launch_id}", takeover=takeover,
            accept_new_store=accept_new_store,
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
            given = {"epoch": epoch or clock.epoch, "text": text_of(lease.group_id), **sample}
            made = make_sample(clock.version if version is None else version, **given)  # type: ignore[arg-type]
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

    def run_out(self, leases: Sequence[Lease]) -> None:
        """Let leases run out, as if their worker had died, while others reaped all the time."""
        self.run_out_ids(leases[0].task, [lease.group_id for lease in leases])

    def run_out_ids(self, task: str, ids: Sequence[int]) -> None:
        keys = task_keys(self.buffer.run, task)
        self.buffer.client.zadd(keys.status(Status.RUNNING), {str(group_id): 1.0 for group_id in ids})
        set_clock(self.buffer, task, reaped_ms=self.buffer.server_ms(), hold_until_ms=0)

    def statuses(self, task: str = "math") -> dict[str, int]:
        """Groups by status, zeros left out."""
        return {status.value: n for status, n in self.buffer.counts(task).statuses.items() if n}

    def collect(self) -> None:
        """Remove payloads that nobody needs, and assert that all others are left."""
        self.collect_without_check()
        named = {
            name
            for task in self.buffer.tasks()
            for text in payloads_of(self.buffer, task).values()
            if (name := PayloadName.parse(task, text))
        }
        assert {name for page in self.buffer.payloads.pages() for name in page} == named

    def collect_without_check(self) -> None:
        """Remove payloads that nobody needs, with two passes of an audit."""
        for task in self.buffer.tasks():
            self.buffer.collect(task)
        audit = Audit(self.buffer)
        for now_s in (0.0, AUDIT_PAUSE_S):
            audit.step(now_s)
            while audit.is_at_work:
                audit.step(now_s)

    def check(self) -> None:
        """Assert what must hold at every moment: conservation, one status per group, indexes that match payloads."""
        for task in self.buffer.tasks():
            check_task(self.buffer, task)
