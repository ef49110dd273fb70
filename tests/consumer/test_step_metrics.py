"""What the metrics of a step say of its batch: response lengths, equal rewards, staleness, and the divergence."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollq.buffer.values.curves import LINES, numbers_of
from rollq.buffer.values.rollouts import FinishReason, Sample
from rollq.consumer import Batch
from rollq.consumer.batches.response_lengths import described_lengths, response_lengths
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import OtherLogprobs, policy_loss
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.step_metrics import StepMetrics, describe_batch
from support.consumer_groups import make_group, make_sample, make_segment, random_groups
from support.tiny_qwen3 import tiny_qwen3


def sample(tokens: int, reward: float | None = 1.0, *, was_cut: bool = False) -> Sample:
    made = make_sample(make_segment([1, 2], [3] * tokens), reward=reward)
    return replace(made, finish_reason=FinishReason.LENGTH) if was_cut else made


def test_lengths_are_of_trained_samples_over_all_their_turns() -> None:
    turns = make_sample(make_segment([1], [2, 3]), make_segment([1, 2, 3, 4], [5, 6, 7]))
    batch = Batch.build(1, [make_group(turns, sample(20, None), sample(1, was_cut=True)), make_group(sample(3))])
    found = described_lengths([response_lengths(batch)])["response_length"]
    assert found == {"mean": 3.0, "p95": 5, "max": 5, "clip_ratio": pytest.approx(1 / 3)}


def test_the_longest_twentieth_is_above_p95() -> None:
    batch = Batch.build(1, [make_group(*[sample(tokens) for tokens in range(1, 101)])])
    assert described_lengths([response_lengths(batch)])["response_length"]["p95"] == 96


def test_ranks_together_have_the_lengths_of_the_batch() -> None:
    groups = random_groups(3)
    shares = [response_lengths(Batch.build(1, groups, rank=rank, world_size=2)) for rank in range(2)]
    assert all(shares)
    assert described_lengths(shares) == described_lengths([response_lengths(Batch.build(1, groups))])


def test_groups_with_equal_rewards_are_a_share_of_the_groups_that_are_trained() -> None:
    mixed, equal = (sample(1, 0.0), sample(1, 1.0)), (sample(1, 0.5), sample(1, 0.5), sample(1, None))
    groups = [make_group(*samples, group_id=at) for at, samples in enumerate([mixed, equal, [sample(1, None)], mixed])]
    assert describe_batch(Batch.build(1, groups))["frac_reward_zero_std"] == pytest.approx(1 / 3)
    assert "frac_reward_zero_std" not in describe_batch(Batch.build(1, [make_group(sample(1, None))]))


def test_a_step_has_its_staleness_and_its_divergence_from_the_reference() -> None:
    model = tiny_qwen3()
    groups = [make_group(make_sample(make_segment([1, 2], [3, 4, 5], version=version)), group_id=version)
              for version in (0, 2)]  # fmt: skip
    batch, metrics = Batch.build(3, groups), LossMetrics()
    micro = batch.to_torch()
    settings = LossSettings(kl_coefficient=0.5, entropy=True)
    reference = token_logprobs(model, micro).logprobs.detach() + 0.3
    policy_loss(model, micro, settings, others=OtherLogprobs(reference=reference), metrics=metrics)
    line = {**describe_batch(batch), **StepMetrics.gather(batch, metrics, Ranks()).result()}
    assert line["staleness"] == pytest.approx((3 * 2 + 3 * 0) / 6)
    assert line["kl"] == pytest.approx(np.exp(0.3) - 1.3, abs=1e-5)
    assert {"entropy", "response_length/max", "mismatch/mean", "rewards/math"} <= numbers_of(line).keys()


def test_without_a_reference_there_is_no_divergence() -> None:
    metrics = LossMetrics()
    policy_loss(tiny_qwen3(), Batch.build(1, random_groups(1)).to_torch(), LossSettings(), metrics=metrics)
    assert not {"kl", "entropy"} & metrics.result().keys()
    assert torch.isfinite(torch.tensor(metrics.result()["staleness"]))


def test_the_table_names_nothing_twice() -> None:
    for kind in ("trl", "verl"):
        names = [getattr(line, kind) for line in LINES if getattr(line, kind)]
        assert len(set(names)) == len(names)
