"""A small world for producers: a run on a real server, prompts in a file, and stand-ins for worker and trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import InvalidPrompt
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.failures import FailureKind
from rollq.buffer.values.rollouts import (
    FinishReason,
    GroupResult,
    Lease,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.producer.producer import Producer, ShouldContinue, TaskFeed
from rollq.producer.prompt_order import make_order
from rollq.producer.prompts import PromptFile
from rollq.producer.sampler import Sampler
from rollq.producer.settings import ProducerSettings, ProducerTask
from support.no_numbers import no_numbers

TASK = "math"


class Rows:
    """A source of `rows` prompts named by their row, of which `bad` cannot be used."""

    def __init__(self, rows: int, bad: frozenset[int] = frozenset()) -> None:
        self.rows = rows
        self.bad = bad
        self.account = "account"

    def place(self, row: int) -> str:
        return f"rows:{row + 1}"

    def prompt(self, row: int) -> Prompt:
        if row in self.bad:
            raise InvalidPrompt(f"rows:{row + 1}: bad")
        return Prompt(content=str(row), row=row)


def contents(found: list[tuple[Prompt, int]]) -> list[str]:
    return [str(prompt.content) for prompt, _ in found]


def prompt_file(path: Path, rows: int) -> Path:
    """A file of `rows` prompts "0", "1", ..."""
    path.write_bytes(b"".join(orjson.dumps({"prompt": str(i), "answer": i}) + b"\n" for i in range(rows)))
    return path


def task_settings(prompts: Path, **changes: Any) -> ProducerTask:
    return ProducerTask(**{"prompts": prompts, "batch_groups": 4, "group_size": 1, "max_staleness": 1, **changes})


def make_run(url: str, run: str, task: ProducerTask) -> Buffer:
    """The buffer of a run with one task, created if need be."""
    buffer = Buffer.connect(url, run)
    buffer.create_run()
    buffer.register_task(TASK, task)
    return buffer


def begin(buffer: Buffer, **changes: Any) -> TrainerEpoch:
    """A trainer takes the run at step 0."""
    start = {"trainer_id": "t", "launch_id": "l", "from_step": 0, "uri": "none", "digest": "d0"}
    return buffer.begin_epoch(**{**start, **changes})


@contextmanager
def producer(
    url: str, run: str, task: ProducerTask, *, should_continue: ShouldContinue | None = None, **changes: Any
) -> Iterator[Producer]:
    """A producer with connections of its own."""
    with make_run(url, run, task) as buffer, PromptFile(task) as source:
        stats_of = partial(buffer.prompt_stats, TASK)
        sampler = Sampler(source, (0,), task.max_bad_rows, make_order(task, no_numbers), stats_of, passes=task.passes)
        feed = TaskFeed(
            TASK, sampler, task.max_prompt_tokens, task.min_keep_rate, should_continue, task.stop_after_failures
        )
        yield Producer(buffer, open_queue(url, run), ProducerSettings(**changes), [feed])


def order(task: ProducerTask, n: int) -> list[str]:
    """The first `n` prompts of the task."""
    with PromptFile(task) as source:
        found = Sampler(source, (0,), task.max_bad_rows).prompts_from(0, n)
    return [str(prompt.content) for prompt, _ in found]


def lease(buffer: Buffer, n: int) -> list[Lease]:
    """Take up to `n` groups as a worker that follows the live weights."""
    clock = buffer.clock(TASK)
    return list(buffer.lease([TASK], n, worker="w", version=clock.version, epoch=clock.epoch).leases)


def put(
    buffer: Buffer,
    leases: list[Lease],
    status: SampleStatus = SampleStatus.COMPLETED,
    *,
    reward: float = 1.0,
    **changes: Any,
) -> None:
    """Hand in one sample per lease, made by the live weights."""
    clock = buffer.clock(TASK)
    results = []
    for item in leases:
        segment = Segment(
            prompt_ids=np.array([1, 2], np.int32),
            response_ids=np.array([3], np.int32),
            logprobs=np.array([-0.5], np.float32),
            versions=(VersionSpan(clock.epoch, clock.version, 1),),
        )
        reason = FinishReason.ABORT if status is SampleStatus.ABORTED else FinishReason.STOP
        judged = reward if status is SampleStatus.COMPLETED else None
        failure = FailureKind.GRADER if status is SampleStatus.FAILED else None
        results.append(GroupResult(item, (Sample((segment,), status, reason, judged, failure=failure),), **changes))
    buffer.put(results)


def train(buffer: Buffer, held: TrainerEpoch, step: int, groups: int) -> bool:
    """Claim, commit and publish `step`; False when its batch is not full."""
    if not isinstance(buffer.claim(held, step, {TASK: groups}), Claimed):
        return False
    buffer.publish(held, step, uri="none", digest=f"d{step}")
    buffer.commit(held, step)
    return True
