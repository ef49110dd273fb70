"""A run whose roles are traced, with real processes and a collector that works, hangs, or is gone."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from support.collector import Collector, GotSpan, collecting
from support.forked_roles import role
from support.forks import fork
from support.loop_trainer import train
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S, wait_until

SETTINGS = """
run = "{run}"
[redis]
buffer_url = "{url}"
[tasks.math]
prompts = "p.jsonl"
batch_groups = 4
group_size = 2
[worker]
engine = "simulated"
grace_s = 1.0
options = {{ lengths = [3, 5], tokens_per_s = 500.0 }}
"""
STEPS = 1_000_000


class TracedRun:
    """A producer, a worker and a trainer, whose processes get the variables of this one."""

    def __init__(self, folder: Path, buffer: Buffer, url: str, roles: ExitStack) -> None:
        self.folder, self.buffer, self.url, self.roles = folder, buffer, url, roles
        (folder / "p.jsonl").write_text("".join(f'{{"prompt": "p{row}", "answer": "1"}}\n' for row in range(50)))
        (folder / "rollq.toml").write_text(SETTINGS.format(run=buffer.run, url=url))
        tiny_qwen3().save_pretrained(folder / "model")

    def start(self) -> None:
        for name in ("produce", "work"):
            self.roles.enter_context(role(self.folder, name, "rollq.toml"))
        self.until(lambda: self.buffer.client.exists(self.buffer.keys.info) == 1 and "math" in self.buffer.tasks())
        log = self.folder / "train-.log"
        self.trainer = fork(self.folder, log, train, self.url, self.buffer.run, self.folder / "model", STEPS)
        self.roles.callback(self.trainer.join, PATIENCE_S)
        self.roles.callback(self.trainer.terminate)

    def until(self, happened: Callable[[], bool]) -> None:
        wait_until(happened, otherwise=lambda: [path.read_text() for path in sorted(self.folder.glob("*.log"))])

    def until_step(self, step: int) -> None:
        self.until(lambda: self.buffer.clock("math").committed >= step)

    def log(self, name: str) -> str:
        return next(self.folder.glob(f"{name}-*.log")).read_text()


@pytest.fixture
def traced(tmp_path: Path, buffer: Buffer, server_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TracedRun]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    with ExitStack() as roles:
        yield TracedRun(tmp_path, buffer, server_url, roles)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def whole_traces(collector: Collector) -> list[list[GotSpan]]:
    """The traces that have all spans of a group that was trained."""
    by_trace: dict[bytes, list[GotSpan]] = {}
    for span in list(collector.spans):
        by_trace.setdefault(span.trace_id, []).append(span)
    wanted = {"group", "queued", "attempt", "generate", "judge", "put", "waiting", "train"}
    return [spans for spans in by_trace.values() if {span.name for span in spans} >= wanted]


def test_a_trained_group_is_one_trace_of_worker_and_trainer(traced: TracedRun, collector: Collector) -> None:
    traced.start()
    traced.until(lambda: len(whole_traces(collector)) >= 8)
    for spans in whole_traces(collector):
        (life,) = [span for span in spans if span.name == "group"]
        one = {span.name: span for span in spans}
        ids = {span.span_id: span for span in spans}
        assert len(ids) == len(spans)
        assert life.parent_id == b""
        assert all(span.parent_id in ids for span in spans if span is not life)
        services = {span.name: span.service for span in spans}
        assert {name for name, service in services.items() if service == "rollq-trainer"} == {
            "group", "waiting", "train"
        }  # fmt: skip
        assert len([span for span in spans if span.name == "generate"]) == 2
        assert life.start_ms == one["queued"].start_ms
        assert one["queued"].end_ms == one["attempt"].start_ms
        assert one["waiting"].end_ms == one["train"].start_ms
        assert one["train"].end_ms == life.end_ms
        assert life.attributes["rollq.outcome"] == "trained"
        assert life.attributes["rollq.step"] == one["train"].attributes["rollq.step"] >= 1
        assert life.attributes["rollq.tokens"] == one["attempt"].attributes["rollq.tokens"] > 0


def test_a_run_goes_on_while_its_collector_hangs_and_is_traced_again_after_it(
    traced: TracedRun, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    collector.answers.clear()
    traced.start()
    traced.until(lambda: collector.requests >= 2)
    step = traced.buffer.clock("math").committed
    traced.until_step(step + 3)
    assert collector.spans == []
    collector.answers.set()
    traced.until(lambda: bool(whole_traces(collector)))


def test_roles_end_while_their_collector_hangs(traced: TracedRun, collector: Collector) -> None:
    collector.answers.clear()
    traced.start()
    traced.until_step(2)
    traced.until(lambda: collector.requests >= 2)
    traced.roles.close()
    assert not collector.answers.is_set()
    assert "spans were not sent, and " in traced.log("work")


@pytest.mark.long
def test_a_run_goes_on_without_its_collector(
    traced: TracedRun, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:s3cret@127.0.0.1:9")
    traced.start()
    traced.until(lambda: "spans are lost, on the way to http://127.0.0.1:9: " in traced.log("work"))
    traced.until_step(traced.buffer.clock("math").committed + 3)
    traced.roles.close()
    assert not [path for path in traced.folder.glob("*.log") if "s3cret" in path.read_text()]
