"""The spans of a worker: what they say of a group, and how they hang together."""

from collections.abc import Callable, Sequence
from socket import gethostname
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollq.buffer.buffer import Buffer
from rollq.buffer.tracing import exporting
from rollq.buffer.tracing.tracer import Tracer
from rollq.buffer.values.rollouts import Sample, Status
from rollq.workers import run
from rollq.workers.run import Worker
from support.waiting import PATIENCE_S
from support.worker_run import Script, WorkerWorld

from .test_fleet import play


class Traced:
    """The spans of all workers of a test."""

    def __init__(self) -> None:
        self.memories: list[InMemorySpanExporter] = []

    def start(self, role: str, name: str, incarnation: Callable[[], str]) -> Tracer:
        self.memories.append(InMemorySpanExporter())
        return Tracer(exporting.Exporting(role, name, self.memories[-1]), name, incarnation())

    def all(self) -> list[ReadableSpan]:
        return [span for memory in self.memories for span in memory.get_finished_spans()]

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    def names(self) -> set[str]:
        return {span.name for span in self.all()}


def facts(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("rollq."): value for name, value in (span.attributes or {}).items()}


def is_parent(parent: ReadableSpan, *children: ReadableSpan) -> bool:
    ids = [(child.parent.trace_id, child.parent.span_id) for child in children if child.parent]
    return ids == [(parent.context.trace_id, parent.context.span_id)] * len(children)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    traced = Traced()
    monkeypatch.setattr(run, "start_tracer", traced.start)
    monkeypatch.setattr(exporting, "EXIT_S", PATIENCE_S)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    return traced


@pytest.fixture
def world(buffer: Buffer, server_url: str) -> WorkerWorld:
    return WorkerWorld(buffer, server_url)


def none_is_kept(prompt: object, samples: Sequence[Sample]) -> bool:
    """A filter that keeps nothing."""
    return False


def test_a_completed_group_shows_where_its_time_went(world: WorkerWorld, traced: Traced) -> None:
    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    before = world.buffer.server_ms()
    world.admit(1)
    world.play(scene)
    after = world.buffer.server_ms()
    queued, attempt, put = traced.one("queued"), traced.one("attempt"), traced.one("put")
    made, judged = traced.named("generate"), traced.named("judge")
    assert traced.names() == {"queued", "attempt", "put", "generate", "judge"}
    assert is_parent(attempt, put, *made, *judged)
    fields = {name: int(value) for name, value in world.buffer.inspect("math", 1).items() if name.endswith("_ms")}
    assert queued.start_time == fields["admitted_ms"] * 10**6
    assert queued.end_time == attempt.start_time
    assert (queued.end_time or 0) <= min(span.start_time or 0 for span in made)
    assert before * 10**6 <= (queued.start_time or 0) <= (attempt.end_time or 0)
    assert (attempt.start_time or 0) <= after * 10**6
    assert [facts(span)["sample"] for span in sorted(made, key=lambda span: facts(span)["sample"])] == [0, 1]
    assert facts(made[0]) == {
        "run": world.buffer.run, "task": "math", "group": 1, "sample": facts(made[0])["sample"], "turn": 1,
        "context_tokens": 6, "tokens": 3, "finish_reason": "stop", "oldest_version": 0, "newest_version": 0,
    }  # fmt: skip
    assert facts(judged[0])["reward"] == 0.0
    said = facts(attempt)
    assert said.pop("worker").startswith(f"{gethostname()}-")
    assert said == {
        "run": world.buffer.run, "task": "math", "group": 1, "attempt": 1, "tries": 1, "samples": 2, "tokens": 6,
        "oldest_version": 0, "newest_version": 0, "mean_reward": 0.0, "outcome": "completed",
    }  # fmt: skip


def test_a_group_that_no_trainer_gets_ends_at_the_worker(buffer: Buffer, server_url: str, traced: Traced) -> None:
    world = WorkerWorld(buffer, server_url, {"filters": [f"{__name__}.none_is_kept"]})

    async def scene(worker: Worker, script: Script) -> None:
        await world.until_count(Status.FILTERED, 1)

    world.admit(1)
    world.play(scene)
    life = traced.one("group")
    assert life.parent is None
    assert is_parent(life, traced.one("queued"), traced.one("attempt"))
    assert life.start_time == traced.one("queued").start_time
    assert (facts(life)["outcome"], facts(life)["evaluation"]) == ("filtered", False)


def test_a_group_that_is_made_twice_has_both_attempts_in_one_trace(world: WorkerWorld, traced: Traced) -> None:
    async def dies(worker: Worker, script: Script) -> None:
        await world.until(lambda: script.running == 2)
        script.engines[0].die()
        await world.until(lambda: bool(traced.named("attempt")))

    async def ends(worker: Worker, script: Script) -> None:
        await world.until_count(Status.COMPLETED, 1)

    world.admit(1)
    world.play(dies, open_gate=False, engine_restarts=9)
    world.tickets(1)
    world.play(ends)
    first, *_, last = traced.named("attempt")
    assert first.context.trace_id == last.context.trace_id
    assert first.context.span_id != last.context.span_id
    assert first.status.description
    assert "the engine died" in first.status.description
    assert (facts(first)["outcome"], facts(last)["outcome"]) == ("handed back", "completed")
    assert len(traced.named("queued")) == 1


def test_samples_that_another_worker_makes_are_part_of_the_attempt(
    buffer: Buffer, server_url: str, traced: Traced
) -> None:
    rules = {"group_size": 8, "max_tokens": 2000, "partial_rollout": True}
    world = WorkerWorld(buffer, server_url, rules)

    async def scene(world: WorkerWorld, workers: Sequence[Worker], script: Script) -> None:
        world.admit(1)
        await world.until(lambda: sorted(worker.places.taken for worker in workers) == [4, 4])
        script.gate.set()
        await world.until_count(Status.COMPLETED, 1)
        await world.until(lambda: all(worker.table.idle for worker in workers))

    play(world, scene, *[{"samples_in_flight": 4}] * 2)
    attempt, loans = traced.one("attempt"), traced.named("loan")
    assert is_parent(attempt, *loans)
    assert {facts(loan)["worker"] for loan in loans}.isdisjoint({facts(attempt)["worker"]})
    assert sorted(facts(span)["sample"] for span in traced.named("generate")) == list(range(8))
    assert sum(is_parent(attempt, span) for span in traced.named("generate")) == 4
