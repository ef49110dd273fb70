"""Losses on batches: the gradient does not depend on layout, micro-batches or ranks, and components do not mix."""

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.values.rollouts import Group
from rollq.consumer import Batch
from rollq.consumer.batches.micro_batch import MicroBatch
from rollq.consumer.losses import PRESETS, LossSettings, distillation, second_moment_mask
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import OtherLogprobs, leave_out_absent, policy_loss
from rollq.consumer.objective.teacher import teacher_logprobs
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.ranks import Ranks
from support.consumer_groups import VOCABULARY, make_group, make_sample, make_segment, random_groups

LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "dr_grpo": {"preset": "dr_grpo", "constant_tokens": 10},
    # random samples are further off policy than the bounds of the preset allow
    "geometric_mis": {"preset": "geometric_mis", "mask_low": 0.9, "mask_high": 1.1},
    "opsm": {"mask": "opsm", "mask_divergence": 0.02},
    "sequence_tis": {"old_logprobs": "recomputed", "correction_level": "sequence"},
}


class Bigram(torch.nn.Module):
    """Predicts each token from the one before; packed or padded, its logits are the same bits."""

    def __init__(self) -> None:
        super().__init__()
        noise = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.table = torch.nn.Parameter(0.3 * noise)

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table[input_ids])


def gradient(
    micro_batches: list[MicroBatch], settings: LossSettings, *, metrics: LossMetrics | None = None
) -> torch.Tensor:
    model = Bigram()
    for micro in micro_batches:
        old = token_logprobs(model, micro).logprobs.detach() - 0.02
        policy_loss(model, micro, settings, others=OtherLogprobs(old), metrics=metrics).backward()  # type: ignore[no-untyped-call]
    return torch.zeros_like(model.table) if model.table.grad is None else model.table.grad


@pytest.mark.parametrize("name", LOSSES)
def test_any_micro_batches_layout_and_ranks_give_the_same_gradient_and_metrics(name: str) -> None:
    settings, groups = LossSettings.model_validate(LOSSES[name]), random_groups(5)
    batch, whole = Batch.build(1, groups), LossMetrics()
    expected = gradient([batch.to_torch()], settings, metrics=whole)
    assert expected.abs().max() > 1e-3
    for max_tokens in (40, 100, 10_000):
        for padded in (False, True):
            got = gradient(batch.micro_batches(max_tokens, padded=padded, whole_samples=True), settings)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    together, summed = LossMetrics(), torch.zeros_like(expected)
    for rank in range(2):
        mine, share = LossMetrics(), Batch.build(1, groups, rank=rank, world_size=2)
        summed += gradient(share.micro_batches(60, whole_samples=True), settings, metrics=mine)
        together.add_sums(mine.sums())
    torch.testing.assert_close(summed, expected, rtol=0, atol=1e-6)
    for key, value in whole.result().items():
        assert together.result()[key] == pytest.approx(value, abs=1e-6), key


def test_the_default_is_bit_for_bit_the_clipped_surrogate_written_out() -> None:
    [micro] = Batch.build(1, random_groups(5)).micro_batches(10_000)
    for settings in (LossSettings(), LossSettings(old_logprobs="recomputed", importance_cap=1.1)):
        found, model = gradient([micro], settings), Bigram()
        new = token_logprobs(model, micro).logprobs
        behaviour, advantages = micro.behaviour_logprobs[micro.loss_mask], micro.advantages[micro.loss_mask]
        old, importance = behaviour, torch.ones_like(behaviour)
        if settings.is_corrected:
            old = new.detach() - 0.02
            importance = (old - behaviour).exp().clamp(max=1.1)
        ratio = (new - old).exp()
        terms = -importance * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (terms * torch.full_like(new, 1 / micro.counts.loss_tokens)).sum().backward()  # type: ignore[no-untyped-call]
        assert model.table.grad is not None
        assert torch.equal(found, model.table.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_without_loss_tokens_have_a_zero_gradient(name: str) -> None:
    settings = LossSettings.model_validate(LOSSES[name])
    [blank] = Batch.build(1, [make_group(make_sample(make_segment([1], [2])))], rank=1, world_size=2).micro_batches(8)
    masked = replace(make_segment([1], [2, 3]), loss_mask=np.zeros(2, np.bool_))
    for micro in (blank, Batch.build(1, [make_group(make_sample(masked))]).to_torch()):
        assert gradient([micro], settings, metrics=LossMetrics()).abs().max() == 0


@pytest.mark.parametrize("name", ["gspo", "gmpo", "topr", "mis", "geometric_mis", "opsm", "sequence_tis"])
def test_a_sample_whose_segments_are_in_several_micro_batches_is_refused(name: str) -> None:
    settings = LossSettings.model_validate(LOSSES[name])
    sample = make_sample(make_segment([1], [2, 3, 4]), make_segment([1], [5, 6, 7]))
    batch = Batch.build(1, [make_group(sample)])
    with pytest.raises(ConfigError, match="whole_samples=True"):
        gradient(batch.micro_batches(4), settings)
    with pytest.raises(ConfigError, match="2 segments of 8 tokens together"):
        batch.micro_batches(4, whole_samples=True)
    gradient(batch.micro_batches(8, whole_samples=True), settings)


def test_segments_of_a_sample_have_one_ratio() -> None:
    sample = make_sample(make_segment([1], [2, 3]), make_segment([4], [5, 6, 7]))
    [micro] = Batch.build(1, [make_group(sample, make_sample(make_segment([1], [8])))]).micro_batches(100)
    metrics = LossMetrics()
    policy_loss(Bigram(), micro, LossSettings(preset="gspo"), metrics=metrics)
    values, sequences = metrics.of_tokens()
    ratios = {int(one): set(values["ratio"][sequences == one].tolist()) for one in np.unique(sequences)}
    assert ratios[0] == ratios[1] != ratios[2]
    assert [len(found) for found in ratios.values()] == [1, 1, 1]


def test_rejected_tokens_are_counted_and_stay_in_the_denominator() -> None:
    """Of two tokens one is far off policy: the gradient of the other is as without the rejection."""
    model = Bigram()
    probe = Batch.build(1, [make_group(*[make_sample(make_segment([1], [token])) for token in (2, 3)])]).to_torch()
    new = token_logprobs(model, probe).logprobs.detach().tolist()
    samples = [
        make_sample(make_segment([1], [2], logprobs=[new[0]]), reward=1.0),
        make_sample(make_segment([1], [3], logprobs=[new[1] - np.log(9)]), reward=0.0),
    ]
    micro, metrics = Batch.build(1, [make_group(*samples)]).to_torch(), LossMetrics()
    loss = policy_loss(model, micro, LossSettings(preset="icepop"), metrics=metrics)
    advantage = micro.advantages[micro.loss_mask][0].item()
    assert loss.item() == pytest.approx(-advantage / 2)
    found = metrics.result()
    assert found["masked_fraction"] == 0.5
    assert found["importance"] == pytest.approx(0.5)
    assert found["importance_effective_sample_size"] == pytest.approx(0.5)
    assert "importance" not in metrics_of(micro, LossSettings())
    assert metrics_of(micro, LossSettings())["masked_fraction"] == 0


def metrics_of(micro: MicroBatch, settings: LossSettings) -> dict[str, Any]:
    metrics = LossMetrics()
    policy_loss(Bigram(), micro, settings, metrics=metrics)
    return metrics.result()


def test_a_mask_over_the_whole_batch_is_given_to_its_micro_batches() -> None:
    batch, settings, model = Batch.build(1, random_groups(5)), LossSettings(), Bigram()
    micro_batches = batch.micro_batches(60)
    before = [token_logprobs(model, micro).logprobs.detach() for micro in micro_batches]
    behaviour = [micro.behaviour_logprobs[micro.loss_mask] for micro in micro_batches]
    kept = second_moment_mask(torch.cat(before), torch.cat(behaviour), most=0.1)
    assert 0 < kept.float().mean() < 1
    metrics = LossMetrics()
    for micro, keep in zip(micro_batches, torch.split(kept, [len(one) for one in before]), strict=True):
        policy_loss(model, micro, settings, keep=keep, metrics=metrics).backward()  # type: ignore[no-untyped-call]
    assert metrics.result()["masked_fraction"] == pytest.approx(1 - kept.float().mean().item())
    other = Bigram()
    [whole] = batch.micro_batches(10_000)
    now = token_logprobs(other, whole).logprobs.detach()
    keep = second_moment_mask(now, whole.behaviour_logprobs[whole.loss_mask], most=0.1)
    policy_loss(other, whole, settings, keep=keep).backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    assert other.table.grad is not None
    torch.testing.assert_close(model.table.grad, other.table.grad, rtol=0, atol=1e-6)


def demonstrations(samples: int) -> Group:
    """Samples without logprobs, of three tokens each, from the tokens 20 to 22."""
    segment = make_segment([1], [20, 21, 22], logprobs=[np.nan] * 3)
    return make_group(*[make_sample(segment)] * samples, group_id=50, task="demos")


def test_a_task_that_is_imitated_has_a_denominator_of_its_own() -> None:
    settings, sampled = LossSettings(sft={"demos": 0.5}), random_groups(5)
    alone = gradient(Batch.build(1, sampled).micro_batches(10_000), LossSettings())
    found = []
    for samples in (1, 7):
        batch = Batch.build(1, [*sampled, demonstrations(samples)])
        micro_batches = batch.micro_batches(40)
        assert leave_out_absent(batch, micro_batches, settings) == [(micro, {}) for micro in micro_batches]
        found.append(gradient(micro_batches, settings))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)  # more demonstrations do not weigh more
    [micro], model = Batch.build(1, [demonstrations(2)]).micro_batches(100), Bigram()
    (-0.5 * token_logprobs(model, micro).logprobs.mean()).backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    torch.testing.assert_close(found[0], alone + model.table.grad, rtol=0, atol=1e-6)


def taught(samples: int, *, task: str = "chat", **arrays: Any) -> Group:
    """Samples of three tokens each, from the tokens 20 to 22, with the logprobs of a teacher."""
    found = arrays or {"teacher_logprobs": np.array([-0.5, -4.0, -3.0], np.float32)}
    segment = make_segment([1], [20, 21, 22], logprobs=[-3.4, -3.5, -3.3], arrays=found)
    return make_group(*[make_sample(segment, reward=0.0)] * samples, group_id=60, task=task)


def distilled(batch: Batch, settings: LossSettings, **how: Any) -> torch.Tensor:
    model = Bigram()
    for micro in batch.micro_batches(40, **how):
        teacher = teacher_logprobs(batch, micro, settings.distillation)
        policy_loss(model, micro, settings, others=OtherLogprobs(teacher=teacher)).backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    return model.table.grad


def test_a_task_that_is_distilled_follows_its_teacher_with_a_separate_denominator() -> None:
    settings, sampled = LossSettings(distillation={"chat": 0.5}), random_groups(5)
    alone = distilled(Batch.build(1, sampled), LossSettings())
    batches = [Batch.build(1, [*sampled[:2], taught(samples), *sampled[2:]]) for samples in (1, 7)]
    one, many = (distilled(batch, settings) for batch in batches)
    torch.testing.assert_close(one, many, rtol=0, atol=1e-6)
    torch.testing.assert_close(distilled(batches[1], settings, padded=True), many, rtol=0, atol=1e-6)
    [micro], model = Batch.build(1, [taught(2)]).micro_batches(100), Bigram()
    new = token_logprobs(model, micro).logprobs
    terms = distillation(new, micro.behaviour_logprobs[micro.loss_mask], torch.tensor([-0.5, -4.0, -3.0] * 2))
    (0.5 * terms.mean()).backward()  # type: ignore[no-untyped-call]
    assert model.table.grad is not None
    assert model.table.grad.abs().max() > 1e-3
    torch.testing.assert_close(one, alone + model.table.grad, rtol=0, atol=1e-6)


def test_what_the_teacher_likes_becomes_likelier() -> None:
    batch, model = Batch.build(1, [taught(2)]), Bigram()
    settings, [micro] = LossSettings(distillation={"chat": 1.0}), batch.micro_batches(100)
    before = token_logprobs(model, micro).logprobs.detach()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    teacher = teacher_logprobs(batch, micro, settings.distillation)
    policy_loss(model, micro, settings, others=OtherLogprobs(teacher=teacher)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    assert ((token_logprobs(model, micro).logprobs > before) == (teacher > before)).all()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(3)}, r"group 60 of task 'chat' has no array 'teacher_logprobs', which distillation in"),
        ({"teacher_logprobs": np.zeros(2)}, r"of shape \[2\]; expected finite numbers of shape \[3\]"),
        ({"teacher_logprobs": np.full(3, np.nan)}, r"finite numbers of shape \[3\]"),
    ],
)
def test_logprobs_of_a_teacher_that_do_not_fit_are_refused(arrays: dict[str, Any], message: str) -> None:
    batch = Batch.build(1, [taught(2, **arrays)])
    assert teacher_logprobs(batch, batch.to_torch(), ["other"]).tolist() == [0.0] * 6
    with pytest.raises(InvalidGroup, match=message):
        teacher_logprobs(batch, batch.to_torch(), ["chat"])


def test_distillation_without_a_teacher_is_refused() -> None:
    settings = LossSettings(distillation={"chat": 1.0})
    policy_loss(Bigram(), Batch.build(1, random_groups(5)).to_torch(), settings)
    with pytest.raises(ConfigError, match=r"distillation needs OtherLogprobs\(teacher="):
        policy_loss(Bigram(), Batch.build(1, [taught(2)]).to_torch(), settings)


def test_the_learner_passes_the_logprobs_of_the_teacher_on(model_folder: Path, tmp_path: Path) -> None:
    def learn(loss: dict[str, Any]) -> float:
        values = {"model": model_folder, "output": tmp_path, "steps": 1, "loss": loss}
        learner, metrics = Learner(TrainerSettings.model_validate(values), None, Ranks()), LossMetrics()
        assert learner.gradients(Batch.build(1, [taught(2)]), metrics, None, threading.Event())
        return metrics.loss

    assert learn({}) == 0  # equal rewards
    assert learn({"distillation": {"chat": 1.0}}) != 0


def test_tokens_that_are_imitated_are_not_clipped_or_masked_whatever_their_logprobs() -> None:
    far = make_sample(make_segment([1], [20, 21], logprobs=[-9.0, -0.1]), reward=1.0)
    micro = Batch.build(1, [make_group(far, make_sample(make_segment([1], [20]), reward=0.0), task="demos")]).to_torch()
    for preset in ("dapo", "icepop"):
        free, imitated = (metrics_of(micro, LossSettings(preset=preset, sft=sft)) for sft in ({}, {"demos": 1.0}))
        assert free["clip_fraction"] + free["masked_fraction"] > 0
        assert imitated["clip_fraction"] + imitated["masked_fraction"] == 0


def test_the_learner_keeps_samples_whole_for_losses_that_compare_them(model_folder: Path, tmp_path: Path) -> None:
    sample = make_sample(make_segment([1], [2, 3, 4]), make_segment([1], [5, 6, 7]))
    batch = Batch.build(1, [make_group(sample, make_sample(make_segment([1], [8]), reward=0.0))])

    def learn(loss: str) -> bool:
        values = {"model": model_folder, "output": tmp_path, "steps": 1, "micro_batch_tokens": 6, "loss": loss}
        learner = Learner(TrainerSettings.model_validate(values), None, Ranks())
        return learner.gradients(batch, LossMetrics(), None, threading.Event())

    assert learn("dapo")
    problem = r"^step 1: .*2 segments of 8 tokens together.*; max_tokens is micro_batch_tokens in \[trainer\]$"
    with pytest.raises(ConfigError, match=problem):
        learn("gspo")


def test_without_its_task_in_sft_absent_logprobs_are_refused_with_that_remedy() -> None:
    batch = Batch.build(1, [demonstrations(2)])
    for settings in (LossSettings(), LossSettings(sft={"other": 1.0})):
        with pytest.raises(InvalidGroup, match=r"inserted without logprobs.*name the task in sft.*leave_out_absent"):
            gradient(batch.micro_batches(100), settings)


@pytest.mark.parametrize("preset", ["ppo", "gspo", "mis"])
def test_samples_that_lack_logprobs_are_left_out_and_stay_in_the_denominators(preset: str) -> None:
    settings = LossSettings(preset=preset)
    sampled, mixed = random_groups(5), Batch.build(1, [*random_groups(5), demonstrations(4)])
    left = leave_out_absent(mixed, mixed.micro_batches(60), settings)
    assert sum((tokens for _, tokens in left), Counter()) == {"demos": 12}
    found = gradient([micro for micro, _ in left], settings)
    alone = Batch.build(1, sampled)
    share = alone.counts.loss_tokens / mixed.counts.loss_tokens
    if settings.aggregation == "sequence":
        share = alone.counts.samples / mixed.counts.samples
    expected = gradient(alone.micro_batches(60), settings) * share
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tokens", [100, 4])
def test_a_sample_whose_second_segment_lacks_logprobs_is_left_out_as_a_whole(tokens: int) -> None:
    half = make_sample(make_segment([1], [2, 3]), make_segment([1], [4, 5], logprobs=[np.nan] * 2))
    batch = Batch.build(1, [make_group(half, make_sample(make_segment([1], [6]), reward=0.0))])
    found = leave_out_absent(batch, batch.micro_batches(tokens), LossSettings())
    assert sum(int(micro.loss_mask.sum()) for micro, _ in found) == 1
    assert sum(left_out.total() for _, left_out in found) == 4


def test_a_sample_that_is_left_out_needs_no_teacher() -> None:
    settings = LossSettings(distillation={"demos": 1.0, "chat": 1.0})
    batch = Batch.build(1, [taught(2), demonstrations(2), taught(1)])
    [(micro, left_out)] = leave_out_absent(batch, batch.micro_batches(100), settings)
    assert left_out == {"demos": 6}
    assert len(teacher_logprobs(batch, micro, settings.distillation)) == int(micro.loss_mask.sum()) == 9
