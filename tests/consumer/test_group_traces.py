"""The end of a group's trace at the trainer."""

from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rollq.buffer.buffer import Buffer
from rollq.buffer.tracing import exporting
from rollq.buffer.tracing.spans import trace_of
from rollq.buffer.tracing.tracer import Tracer
from rollq.consumer import Consumer, ConsumerSettings
from rollq.consumer import consumer as consumer_module
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import PATIENCE_S


def test_a_commit_ends_the_traces_of_its_groups_also_when_they_leave_at_once(
    buffer: Buffer, server_url: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = InMemorySpanExporter()

    def start(role: str, run: str, incarnation: object) -> Tracer:
        return Tracer(exporting.Exporting(role, run, memory), run, buffer.incarnation)

    monkeypatch.setattr(exporting, "EXIT_S", PATIENCE_S)
    monkeypatch.setattr(consumer_module, "start_tracer", start)
    make_run(buffer, resume="fresh")
    worker = HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker")
    settings = ConsumerSettings(transport="redis")
    with Consumer.connect(server_url, run=buffer.run, weights=model_folder, settings=settings) as consumer:
        worker.produce(2)
        batch = next(consumer)
        fields = {group_id: buffer.inspect("math", group_id) for _, group_id in batch.group_ids}
        consumer.publish(model_folder, step=1)
        consumer.commit(batch)
        after_ms = buffer.server_ms()
    spans = memory.get_finished_spans()
    assert [span.name for span in spans] == ["waiting", "train", "group"] * 2
    for group_id, (waiting, train, life) in zip(fields, (spans[:3], spans[3:]), strict=True):
        trace = trace_of(buffer.run, buffer.incarnation, "math", group_id)
        assert {span.context.trace_id for span in (waiting, train, life)} == {trace.trace_id}
        assert life.context.span_id == trace.life_id
        assert [span.parent and span.parent.span_id for span in (waiting, train, life)] == [trace.life_id] * 2 + [None]
        assert life.start_time == int(fields[group_id]["admitted_ms"]) * 10**6
        assert waiting.start_time == int(fields[group_id]["put_ms"]) * 10**6
        assert waiting.end_time == train.start_time
        assert (train.start_time or 0) <= (train.end_time or 0) == life.end_time
        assert (life.end_time or 0) <= after_ms * 10**6
        said = dict(life.attributes or {})
        assert said["rollq.mean_reward"] == pytest.approx(float(fields[group_id]["reward"]))
        assert (said["rollq.outcome"], said["rollq.step"], said["rollq.oldest_version"]) == ("trained", 1, 0)
        assert said["rollq.tokens"] == int(fields[group_id]["tokens"])
