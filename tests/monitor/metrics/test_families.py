"""Each metric that is served has the value of the status, as a parser of OpenMetrics reads it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_classic

from rollq.buffer.calls.evaluations import EvaluationState
from rollq.buffer.calls.replies.tasks import LastError
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.rollouts import Status
from rollq.monitor.metrics.catalogue import CALLS, METRICS, UP
from rollq.monitor.metrics.families import RunCollector
from rollq.monitor.status.read import RunStatus
from rollq.monitor.status.wanted_workers import wanted_workers
from support.run_statuses import RATES, run_status, task_status, trainer_state, worker

PROGRESS = {
    "admitted": 900, "leased": 850, "queued_ms": 1500, "produced": 840, "worked_ms": 8_400_250, "tokens": 1_000_000,
    "expired": 3, "filtered": 40, "failed": 7, "requeued": 2, "refused": 1,
}  # fmt: skip
MATH = task_status(
    "math", {Status.PENDING: 4, Status.COMPLETED: 9}, progress=PROGRESS, dropped={"trained": 600, "expired": 3},
    failed_samples={"grader": 12, "sandbox": 3},
    by_staleness={0: 5, 1: 4}, bytes={"completed": 4096}, rates=RATES, pending_age_s=1.5, ready_age_s=8.25,
    last_error=LastError("the judge is away", 12.0),
)  # fmt: skip
REPORT = {"step": 40, "reward": 0.5, "rewards": {"math": 0.75}, "mismatch": {"mean": 0.01}, "age_s": 2.0}
RUN = run_status(
    MATH,
    task_status('co"de\n', control="pause"),
    tickets=6,
    fullness=Fullness(0.25),
    trainer=trainer_state(report=REPORT, busy_s=2.0, waited_s=0.5),
    workers={
        "worker-1": worker(3, samples=5600, swaps=40, swap_pause_s=1.25, refused_outcomes=3),
        "worker-2": worker(condition="dead"),
    },
)

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def served(status: RunStatus | None) -> str:
    registry = CollectorRegistry()
    registry.register(RunCollector("sums", status))
    encode, _ = choose_encoder("application/openmetrics-text;version=1.0.0")
    return encode(registry).decode()


def parsed(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def one(name: str, **labels: Any) -> float:
    key = {"run": "sums"} | {label: str(value) for label, value in labels.items()}
    return parsed(served(RUN))[name, frozenset(key.items())]


def test_every_sample_is_what_the_catalogue_reads_and_nothing_is_missing() -> None:
    expected = {
        (metric.name, frozenset({"run": "sums", **dict(zip(metric.labels, labels, strict=True))}.items())): value
        for metric in (UP, CALLS, *METRICS)
        for labels, value in metric.read(RUN)
    }
    assert parsed(served(RUN)) == expected


def test_the_values_are_those_of_the_status() -> None:
    math, busy = RUN.tasks[0], RUN.workers["worker-1"]
    assert one("rollq_up") == 1
    assert one("rollq_state", state="paused") == 1
    assert one("rollq_state", state="training") == 0
    assert RUN.model is not None
    assert RUN.trainer is not None
    assert one("rollq_model_version") == RUN.model.version
    assert one("rollq_epoch") == RUN.model.epoch
    assert one("rollq_tickets") == RUN.tickets
    assert one("rollq_memory_used_ratio") == RUN.fullness.share
    assert (one("rollq_workers", condition="alive"), one("rollq_workers", condition="dead")) == (1, 1)
    assert one("rollq_trainer_phase", phase="training") == 1
    assert one("rollq_trainer_phase_seconds") == RUN.trainer.for_s
    assert one("rollq_trainer_silent_seconds") == RUN.trainer.silent_s
    assert one("rollq_trainer_lease_seconds") == RUN.trainer.lease_left_s
    assert one("rollq_trainer_step") == RUN.trainer.step
    assert (one("rollq_trainer_busy_seconds"), one("rollq_trainer_waited_seconds")) == (2.0, 0.5)
    assert one("rollq_trainer_reward") == REPORT["reward"]
    assert one("rollq_trained_reward", task="math") == 0.75
    assert one("rollq_trainer_mismatch_nats") == 0.01
    assert one("rollq_step", task="math") == math.step
    assert one("rollq_control", task='co"de\n', control="pause") == 1
    assert one("rollq_groups", task="math", status="pending") == 4
    assert one("rollq_ready_groups", task="math") == math.ready
    assert one("rollq_batch_groups", task="math") == math.batch_groups
    assert one("rollq_stale_groups", task="math", staleness=1) == 4
    assert one("rollq_trained_groups", task="math") == math.trained
    assert one("rollq_scheduled_groups", task="math") == math.scheduled
    assert one("rollq_allowed_groups", task="math") == math.limit
    assert one("rollq_kept_ratio", task="math") == math.kept / math.outcomes
    assert one("rollq_samples_bytes", task="math", status="completed") == 4096
    assert one("rollq_oldest_group_seconds", task="math", status="pending") == math.pending_age_s
    assert one("rollq_oldest_group_seconds", task="math", status="completed") == math.ready_age_s
    assert one("rollq_waited_seconds", task="math") == RATES.waited_s
    assert one("rollq_producer_silent_seconds", task="math") == math.producer_silent_s
    assert one("rollq_last_error_seconds", task="math") == 12.0
    assert one("rollq_admitted_groups_total", task="math") == PROGRESS["admitted"]
    assert one("rollq_leased_groups_total", task="math") == PROGRESS["leased"]
    assert one("rollq_queued_seconds_total", task="math") == 1.5
    assert one("rollq_attempts_total", task="math") == PROGRESS["produced"]
    assert one("rollq_worked_seconds_total", task="math") == 8400.25
    assert one("rollq_tokens_total", task="math") == PROGRESS["tokens"]
    for name in ("expired", "filtered", "failed", "requeued"):
        assert one(f"rollq_{name}_groups_total", task="math") == PROGRESS[name]
    assert one("rollq_refused_results_total", task="math") == PROGRESS["refused"]
    assert one("rollq_dropped_groups_total", task="math", reason="trained") == 600
    assert one("rollq_failed_samples_total", task="math", kind="grader") == 12
    assert one("rollq_worker_report_age_seconds", worker="worker-1") == busy["age_s"]
    assert one("rollq_worker_version", worker="worker-1") == busy["version"]
    assert one("rollq_worker_groups", worker="worker-1") == busy["in_flight"]
    assert one("rollq_worker_samples_in_flight", worker="worker-1") == busy["samples_in_flight"]
    assert one("rollq_worker_capacity_samples", worker="worker-1") == busy["capacity"]
    assert one("rollq_worker_batch_ratio", worker="worker-1") == busy["batch_share"]
    assert one("rollq_worker_tokens_per_second", worker="worker-1") == busy["tokens_per_s"]
    assert one("rollq_worker_generate_seconds", worker="worker-1") == busy["generate_s"]
    assert one("rollq_worker_judge_seconds", worker="worker-1") == busy["judge_s"]
    assert one("rollq_worker_swaps_total", worker="worker-1") == 40
    assert one("rollq_worker_swap_pause_seconds_total", worker="worker-1") == 1.25
    assert one("rollq_worker_finished_groups_total", worker="worker-1") == busy["groups"]
    assert one("rollq_worker_samples_total", worker="worker-1") == 5600
    assert one("rollq_worker_failed_samples_total", worker="worker-1") == busy["failed_samples"]
    assert one("rollq_worker_refused_outcomes_total", worker="worker-1") == 3


def test_wanted_workers_are_served_once_they_are_known() -> None:
    known = replace(RUN, tasks=(MATH,))
    assert wanted_workers(known) is not None
    assert parsed(served(known))["rollq_wanted_workers", frozenset({("run", "sums")})] == wanted_workers(known)
    assert "rollq_wanted_workers" not in served(run_status())


def test_a_run_that_cannot_be_read_is_down_and_has_nothing_else() -> None:
    assert parsed(served(None)) == {("rollq_up", frozenset({("run", "sums")})): 0.0}


def test_a_run_without_a_trainer_or_workers_lacks_their_series() -> None:
    text = served(run_status(trainer=None, model=None, workers={}))
    assert "rollq_trainer" not in text
    assert "rollq_worker_" not in text
    assert "rollq_model_version" not in text


def test_prometheus_itself_reads_the_classic_format() -> None:
    registry = CollectorRegistry()
    registry.register(RunCollector("sums", RUN))
    encode, content_type = choose_encoder("text/plain")
    assert "0.0.4" in content_type
    names = {sample.name for family in parse_classic(encode(registry).decode()) for sample in family.samples}
    assert {"rollq_up", "rollq_tokens_total", "rollq_worker_groups"} <= names


@pytest.mark.parametrize("metric", [UP, CALLS, *METRICS], ids=lambda metric: metric.name)
def test_a_name_follows_the_conventions(metric: Any) -> None:
    assert metric.name.startswith("rollq_")
    assert not metric.name.endswith(("_ms", "_kib", "_percent", "_s"))
    assert metric.text[0].isupper() or metric.text[0].isdigit()
    assert not metric.text.endswith(".")


def test_no_two_metrics_have_one_name() -> None:
    names = [metric.name for metric in (UP, CALLS, *METRICS)]
    assert len(names) == len(set(names))


def test_numbers_of_the_last_step_and_evaluations_are_served_within_bounds() -> None:
    report = {"step": 3, "response_length": {"p95": 30}, "parts": {"math": {"a/b": 0.5}}, "loss": float("inf")}
    report["rewards"] = {f"task-{at}": 1.0 for at in range(10_000)}
    held_out = task_status("held_out", kind="eval", evaluation=EvaluationState(False, 8, 8, 0, 2, 0.25))
    status = replace(RUN, tasks=(*RUN.tasks, held_out), trainer=trainer_state(report=report))
    found = parsed(served(status))
    run = ("run", "sums")
    assert found["rollq_trained_response_p95_tokens", frozenset({run})] == 30
    assert found["rollq_evaluated_reward", frozenset({run, ("evaluation", "held_out")})] == 0.25
    assert ("rollq_trained_loss", frozenset({run})) not in found
    assert sum(name == "rollq_trained_reward" for name, _ in found) < 100
    few = replace(status, trainer=trainer_state(report={**report, "rewards": {}}))
    assert parsed(served(few))["rollq_trained_part", frozenset({run, ("task", "math"), ("part", "a/b")})] == 0.5
