"""The small world that benchmarks share: a server, a run with one task, prompts, samples, groups on their way."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from rollq.buffer.buffer import Buffer
from rollq.buffer.replies import TrainerEpoch
from rollq.buffer.rollouts import (
    FinishReason,
    GroupResult,
    Lease,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.settings import TaskRules
from rollq.buffer.store.server import EmbeddedServer

TASK = "math"
VOCABULARY = 150_000
QUESTION = (
    "A shop sells {} pencils in April and half as many in May. In June it sells a third of what it sold in the two "
    "months before, and gives two boxes of twelve away. How many pencils have left the shop since the first of April?"
)
SAMPLING = {"max_tokens": 2048, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "seed": None}


@contextmanager
def server() -> Iterator[EmbeddedServer]:
    """An embedded server with the append-only file on (everysec), gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rollq-bench-") as directory, EmbeddedServer(Path(directory)) as running:
        yield running


@contextmanager
def run(url: str, name: str, rules: TaskRules) -> Iterator[tuple[Buffer, TrainerEpoch]]:
    """A run with one task and a trainer at step 0."""
    with Buffer.connect(url, name) as buffer:
        buffer.create_run()
        buffer.register_task(TASK, rules)
        yield buffer, buffer.begin_epoch(trainer_id="bench", launch_id=name, from_step=0, uri="", digest="")


def make_sample(random: np.random.Generator, prompt_tokens: int, response_tokens: int, version: int) -> Sample:
    """A completed sample of random ids, made by the weights `version` of epoch 1."""
    return Sample(
        segments=(
            Segment(
                prompt_ids=random.integers(0, VOCABULARY, prompt_tokens, dtype=np.int32),
                response_ids=random.integers(0, VOCABULARY, response_tokens, dtype=np.int32),
                logprobs=-random.random(response_tokens, dtype=np.float32),
                versions=(VersionSpan(1, version, response_tokens),),
            ),
        ),
        status=SampleStatus.COMPLETED,
        finish_reason=FinishReason.STOP,
        reward=float(random.integers(0, 2)),
        sampling=SAMPLING,
    )


def admit_and_lease(buffer: Buffer, epoch: int, cursor: int, groups: int, version: int) -> tuple[Lease, ...]:
    """Bring `groups` new prompts to running; `cursor` is how many came before."""
    prompts = [(Prompt(QUESTION.format(cursor + i), answer=i), cursor + i + 1) for i in range(groups)]
    buffer.admit(TASK, prompts, epoch=epoch, cursor=cursor, target=cursor + groups, step=version + 1)
    leased = buffer.lease([TASK], groups, worker="bench", version=version, epoch=epoch).leases
    if len(leased) != groups:
        raise RuntimeError(f"{groups} groups were admitted, {len(leased)} could be leased")
    return leased


def results_of(leases: Sequence[Lease], samples: Sequence[Sequence[Sample]]) -> list[GroupResult]:
    """The results that answer `leases`."""
    return [GroupResult(lease, tuple(group)) for lease, group in zip(leases, samples, strict=True)]
