"""The gauge of the difference between the trainer's and the engines' logprobs."""

import math

import numpy as np
import pytest
import torch

from rollq.buffer.values.rollouts import FinishReason, Group, Prompt, Sample, SampleStatus, Segment, VersionSpan
from rollq.consumer.batches.batch import Batch
from rollq.consumer.objective.mismatch import LabelledMismatch, Mismatch, MismatchGauge
from rollq.consumer.trainer.step_metrics import likely_causes


def group(number: int, task: str, worker: str, version: int) -> Group:
    """Two samples of three tokens each."""
    prompt, response = np.array([1, 2], np.int32), np.array([3, 4, 5], np.int32)
    segment = Segment(prompt, response, np.zeros(3, np.float32), (VersionSpan(1, version, 3),))
    sample = Sample(
        segments=(segment,), status=SampleStatus.COMPLETED, finish_reason=FinishReason.STOP, reward=1.0,
        extra={"worker": worker},
    )  # fmt: skip
    return Group(task, number, Prompt("p"), (sample, sample), oldest_version=version, arrival=number, tries=1)


def test_a_worker_and_a_version_that_are_off_stand_out() -> None:
    batch = Batch.build(5, [group(1, "math", "w0", 4), group(2, "code", "w1", 3)])
    gauge = MismatchGauge()
    offs = {0: 0.1, 1: -0.1, 2: 2.0, 3: -4.0}  # by sequence
    for number, off in offs.items():
        version = 4 if number < 2 else 3
        gauge.add(torch.full((3,), off), torch.full((3,), number), torch.full((3,), version))
    found = gauge.labelled(batch)
    total = found.total()
    assert total is not None
    assert (total.tokens, total.max) == (12, 4.0)
    assert total.mean == pytest.approx((0.1 + 0.1 + 2 + 4) / 4)
    by = found.by()
    assert by["worker"].keys() == {"w0", "w1"}
    assert by["worker"]["w0"].mean == pytest.approx(0.1)
    assert by["worker"]["w1"].mean == pytest.approx(3.0)
    assert by["worker"]["w1"] == by["task"]["code"] == by["version"]["3"]


def test_the_values_follow_their_formulas() -> None:
    d = np.random.default_rng(0).normal(0, 0.3, 1000).astype(np.float32)
    found, w = Mismatch.of(d), np.exp(d.astype(np.float64))
    assert found.p99 == pytest.approx(np.quantile(np.abs(d), 0.99))
    assert found.kl == pytest.approx((w - 1 - d).mean())
    assert found.effective_sample_size == pytest.approx(w.sum() ** 2 / (1000 * (w**2).sum()))


def test_nothing_is_said_of_no_tokens() -> None:
    gauge = MismatchGauge()
    found = gauge.labelled(Batch.build(5, [group(1, "math", "w0", 4)]))
    assert found.total() is None
    assert found.by() == {"task": {}, "worker": {}, "version": {}}


def test_the_mismatch_of_several_ranks_is_that_of_one() -> None:
    batch = Batch.build(5, [group(1, "math", "w0", 4), group(2, "code", "w1", 3)])
    gauges = [MismatchGauge() for _ in range(3)]  # of both ranks, of the first, of the second
    for number in range(4):
        off, sequence = torch.full((3,), 0.1 * number), torch.full((3,), number)
        for gauge in (gauges[0], gauges[1 + number // 2]):
            gauge.add(off, sequence, torch.full((3,), 4 - number // 2))
    whole, *parts = (gauge.labelled(batch) for gauge in gauges)
    together = LabelledMismatch.together([LabelledMismatch.decode(part.encode()) for part in parts])
    assert together.total() == whole.total()
    assert together.by() == whole.by()
    assert LabelledMismatch.decode(MismatchGauge().labelled(batch).encode()).total() is None


def test_a_high_learning_rate_is_the_likelier_cause_where_tokens_of_the_live_weights_agree() -> None:
    assert likely_causes(3e-6).startswith("the learning rate is far too high, or the engines serve weights other than")
    for error in (0.0, 1.3, math.inf):
        assert likely_causes(error).startswith(
            "the engines serve weights other than those they report, or the learning rate"
        )
