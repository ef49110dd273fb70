"""How many workers a run needs, from how fast its workers are and what the trainer takes."""

from dataclasses import replace
from typing import Any

import pytest

from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.monitor.status.wanted_workers import Speed, wanted_workers, workers_for
from support.run_statuses import RATES, run_status, task_status, trainer_state, worker

TRAINER = trainer_state(busy_s=2.0)
TASK = task_status(rates=RATES, outcomes=100, kept=50)
SLOW = worker(speed={"step_s": 0.0, "sample_step_s": 0.003, "places": 128})
UNKNOWN = worker(speed=None)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, 8),  # 16 groups x 500 tokens / 0.5 kept / 2 s = 8,000 tokens/s, of workers that make 1,000
        ({"trainer": trainer_state(busy_s=4.0)}, 4),
        ({"workers": {f"w{number}": worker() for number in range(20)}}, 8),
        ({"workers": {"w1": SLOW}}, 16),  # not 24: the staleness bound lets 16 groups be made while the trainer trains
        ({"workers": {"w1": worker(), "w2": SLOW}}, 12),  # 667 tokens/s in the mean
        ({"workers": {"w1": worker(), "w2": UNKNOWN}}, 8),
        ({"workers": {"w1": worker(), "w2": {**SLOW, "condition": "dead"}}}, 8),
        ({"tasks": (replace(TASK, kept=100),)}, 4),
        ({"tasks": (replace(TASK, kept=0, stale_threshold=9),)}, 80),  # as with a keep rate of 0.05
        ({"tasks": (TASK, replace(TASK, task="code"))}, 16),
        ({"tasks": (TASK, replace(TASK, kind="eval"))}, 8),
        ({"tasks": (TASK, replace(TASK, control="pause"))}, 8),
        ({"tasks": (replace(TASK, rates=None, progress={"produced": 10, "tokens": 10_000}),)}, 16),
        ({"tasks": (replace(TASK, stale_threshold=1),)}, 8),  # synchronous: as long to generate as to train
        ({"trainer": trainer_state(busy_s=1e9)}, 1),
        ({"tasks": (replace(TASK, control="pause"),)}, 0),
        ({"trainer": trainer_state(TrainerPhase.FINISHED, busy_s=2.0)}, 0),
        ({"trainer": trainer_state()}, None),  # no step yet
        ({"trainer": None}, None),
        ({"tasks": (replace(TASK, rates=None),)}, None),
        ({"workers": {"w1": UNKNOWN}}, None),
        ({"workers": {}}, None),
    ],
)
def test_as_many_workers_are_wanted_as_keep_the_trainer_from_waiting(
    changes: dict[str, Any], wanted: int | None
) -> None:
    assert wanted_workers(run_status(**{"tasks": (TASK,), "trainer": TRAINER, **changes})) == wanted


GPU = Speed(0.01, 0.0001, 256)
"""A step takes 10 ms for the weights, and 0.1 ms for each sample."""


@pytest.mark.parametrize("tokens_per_s", [8_000, 12_000, 20_000])
def test_with_more_workers_each_has_fewer_samples_and_is_slower(tokens_per_s: float) -> None:
    number = workers_for(tokens_per_s, {GPU: 3}, groups=64, samples=512)

    def made(workers: int) -> float:
        return workers * GPU.tokens_per_s(512 / workers)

    assert made(number) >= tokens_per_s > made(number - 1)


def test_no_more_are_wanted_than_can_be_kept_at_half_of_their_speed() -> None:
    number = workers_for(1e9, {GPU: 1}, groups=1000, samples=512)
    full = GPU.tokens_per_s(256)
    assert GPU.tokens_per_s(512 / number) >= 0.5 * full > GPU.tokens_per_s(512 / (number + 1))


def test_a_worker_is_no_faster_with_more_samples_than_it_has_places() -> None:
    assert GPU.tokens_per_s(1000) == GPU.tokens_per_s(256)
    assert workers_for(2 * GPU.tokens_per_s(256), {GPU: 1}, groups=64, samples=10_000) == 2
