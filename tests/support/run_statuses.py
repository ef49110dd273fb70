"""Statuses of made-up runs, for tests of what is made of them."""

from typing import Any

from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.monitor.status.rates import Rates
from rollq.monitor.status.read import RunStatus, TaskStatus, brought_up_to_date

RATES = Rates(60.0, 4.0, 2000.0, 4.0, 0.0, 0.0, 0.0, 1.0, 8.0, 2.0, 0.5)


def task_status(name: str = "math", statuses: dict[Status, int] | None = None, **changes: Any) -> TaskStatus:
    """A task at step 41 with version 40 live, whose producer is there. `statuses` are the numbers of groups that are
    not 0."""
    given = statuses or {}
    values: dict[str, Any] = {
        "kind": "train", "step": 41, "version": 40, "epoch": 1, "control": "run", "control_reason": "",
        "batch_groups": 16, "stale_threshold": 2, "group_size": 8, "checkpoint": 30, "trained": 640,
        "ready": given.get(Status.COMPLETED, 0),
        "scheduled": 640 + sum(given.values()), "limit": 672, "next_version": 41, "outcomes": 100, "kept": 90,
        "producer_silent_s": 0.5, "statuses": {status.value: given.get(status, 0) for status in Status}, **changes,
    }  # fmt: skip
    return TaskStatus(name, **values)


def trainer_state(phase: TrainerPhase | None = TrainerPhase.TRAINING, **changes: Any) -> TrainerState:
    """A trainer at step 41 that was heard just now."""
    values: dict[str, Any] = {"silent_s": 0.5, "lease_left_s": 29.5, "step": 41, "for_s": 12.0, **changes}
    return TrainerState("trainer", 1, phase, **values)


def waiting(lacks: dict[str, tuple[int, int]], **changes: Any) -> TrainerState:
    """A trainer that waits. `lacks` maps tasks to the groups that are ready and wanted."""
    ready, wanted = ({task: pair[i] for task, pair in lacks.items()} for i in (0, 1))
    return trainer_state(TrainerPhase.WAITING, **{"ready": ready, "wanted": wanted, "busy_s": 2.0, **changes})


def worker(in_flight: int = 0, **changes: Any) -> dict[str, Any]:
    """The report of a worker that is alive."""
    return {
        "engine": "simulated", "version": 40, "epoch": 1, "state": "serving" if in_flight else "idle",
        "in_flight": in_flight, "samples_in_flight": 8 * in_flight, "capacity": 128, "host": "box", "pid": 4242,
        "batch_share": 0.25, "idle_s": 0.0 if in_flight else 60.0,
        "speed": {"step_s": 0.0, "sample_step_s": 0.001, "places": 128}, "tokens_per_s": 512.3, "generate_s": 7.5,
        "judge_s": 0.25, "groups": 700, "failed_samples": 0, "age_s": 0.4, "condition": "alive", **changes,
    }  # fmt: skip


def run_status(*tasks: TaskStatus, **changes: Any) -> RunStatus:
    """A run with these tasks, one worker, and a trainer that trains."""
    values: dict[str, Any] = {
        "at_ms": 1_700_000_000_000, "model": LiveModel(1, 40, "abcdef0123456789", "file:///w"), "tickets": 0,
        "tasks": tasks or (task_status(),), "workers": {"worker-1": worker()}, "trainer": trainer_state(), **changes,
    }  # fmt: skip
    values["trainer"] = brought_up_to_date(values["trainer"], values["tasks"])
    return RunStatus("sums", **values)
