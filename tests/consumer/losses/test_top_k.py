"""Distillation on the likeliest tokens of a teacher, in the loss and in the trainer."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.values.rollouts import Group, absent_logprobs
from rollq.consumer.batches.batch import Batch
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import OtherLogprobs, leave_out_absent, policy_loss
from rollq.consumer.objective.teacher import teacher_top_logprobs
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.ranks import Ranks
from support.consumer_groups import make_group, make_sample, make_segment
from support.tiny_qwen3 import tiny_qwen3

SETTINGS = LossSettings.model_validate({"distillation": {"chat": 0.5}, "distilled_tokens": "top_k"})
TEACHER = np.log(np.array([0.5, 0.3, 0.1, 0.05], np.float32))


def taught(top_k: int = 3, *, group_id: int = 60, seed: int = 0, **arrays: Any) -> Group:
    """Two samples of four tokens each, of which the third is none of the model's, with `top_k` tokens of a teacher."""
    found = arrays or {
        "teacher_top_ids": np.random.default_rng(seed).permuted(np.arange(1, 29).reshape(4, 7), axis=1)[:, :top_k],
        "teacher_top_logprobs": np.tile(TEACHER[:top_k], (4, 1)),
    }
    mask = [True, True, False, True]
    segment = make_segment([1, 2], [20, 21, 22, 23], logprobs=[-3.4, -3.5, 0.0, -3.3], loss_mask=mask, arrays=found)
    return make_group(*[make_sample(segment, reward=0.0)] * 2, group_id=group_id, task="chat")


def others() -> Group:
    samples = [make_sample(make_segment([3], [4, 5], logprobs=[-3.0, -3.1]), reward=float(n)) for n in range(2)]
    return make_group(*samples, group_id=7, task="math")


def gradients(model: Any, batch: Batch, settings: LossSettings, tokens: int = 1000, **how: Any) -> dict[str, Any]:
    chunk = how.pop("chunk", 0)
    for micro in batch.micro_batches(tokens, **how):
        top = teacher_top_logprobs(batch, micro, settings.distillation)
        loss = policy_loss(model, micro, settings, others=OtherLogprobs(teacher_top=top), chunk=chunk)
        loss.backward()  # type: ignore[no-untyped-call]
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def by_hand(model: Any, batch: Batch, weight: float) -> dict[str, Any]:
    """The gradients of KL(policy || teacher) on the teacher's tokens and the rest, from the whole distributions."""
    terms = []
    for sequence in batch.sequences:
        if sequence.task != "chat":
            continue
        logits = model(input_ids=torch.from_numpy(sequence.ids)[None].long(), use_cache=False).logits[0]
        for place in np.flatnonzero(sequence.loss_mask):
            row = place - sequence.prompt_tokens
            ids = torch.from_numpy(np.asarray(sequence.arrays["teacher_top_ids"])[row]).long()
            teacher = torch.from_numpy(np.exp(np.asarray(sequence.arrays["teacher_top_logprobs"])[row]))
            policy = logits[place - 1].softmax(-1)[ids]
            rest, taught_rest = 1 - policy.sum(), 1 - teacher.sum()
            terms.append((policy * (policy / teacher).log()).sum() + rest * (rest / taught_rest).log())
    (weight * torch.stack(terms).mean()).backward()  # type: ignore[no-untyped-call]
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert max(float(one.abs().max()) for one in expected.values()) > 1e-4
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("how", [{}, {"padded": True}, {"tokens": 8}, {"chunk": 2}])
def test_the_gradient_is_that_of_the_divergence_from_the_teacher(how: dict[str, Any]) -> None:
    batch = Batch.build(1, [taught(), taught(1, group_id=61, seed=5)])  # 3 tokens of the one, 1 of the other
    assert_equal(gradients(tiny_qwen3(), batch, SETTINGS, **how), by_hand(tiny_qwen3(), batch, 0.5))


def test_other_tasks_keep_their_loss_beside_it() -> None:
    batch, alone = Batch.build(1, [others(), taught()]), Batch.build(1, [others()])
    expected = by_hand(tiny_qwen3(), batch, 0.5)
    for name, one in gradients(tiny_qwen3(), alone, LossSettings()).items():
        expected[name] = expected[name] + one
    assert_equal(gradients(tiny_qwen3(), batch, SETTINGS), expected)


def test_steps_bring_the_policy_to_its_teacher() -> None:
    model, batch = tiny_qwen3(), Batch.build(1, [taught()])
    [micro] = batch.micro_batches(100)
    top = teacher_top_logprobs(batch, micro, ["chat"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def distance() -> float:
        others = token_logprobs(model, micro, others=top.ids).others
        assert others is not None
        return float((others.detach().exp() - top.logprobs.exp()).abs().max())

    before = distance()
    for _ in range(60):
        optimizer.zero_grad()
        policy_loss(model, micro, SETTINGS, others=OtherLogprobs(teacher_top=top)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert distance() < 0.1 < before


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(4)}, "no array 'teacher_top_ids'.*with top_k set to the number"),
        ({"teacher_top_ids": np.zeros((4, 2), np.int32)}, "no array 'teacher_top_logprobs'"),
        (
            {"teacher_top_ids": np.zeros((4, 2), np.int32), "teacher_top_logprobs": np.zeros((4, 3))},
            r"of shapes \[4, 2\] and \[4, 3\]; expected ids and logprobs of shape \[4, k\]",
        ),
        ({"teacher_top_ids": np.zeros((3, 2), np.int32), "teacher_top_logprobs": np.zeros((3, 2))}, r"shape \[4, k\]"),
        ({"teacher_top_ids": np.zeros((4, 2)), "teacher_top_logprobs": np.zeros((4, 2))}, "ids and logprobs of shape"),
        ({"teacher_top_ids": np.full((4, 2), -1), "teacher_top_logprobs": np.zeros((4, 2))}, "ids and logprobs of"),
        (
            {"teacher_top_ids": np.zeros((4, 1), np.int32), "teacher_top_logprobs": np.full((4, 1), np.nan)},
            "that are not finite",
        ),
    ],
)
def test_tokens_of_a_teacher_that_do_not_fit_are_refused(arrays: dict[str, Any], message: str) -> None:
    batch = Batch.build(1, [taught(**arrays)])
    assert teacher_top_logprobs(batch, batch.to_torch(), ["other"]).ids.shape == (6, 0)
    with pytest.raises(InvalidGroup, match=message):
        teacher_top_logprobs(batch, batch.to_torch(), ["chat"])


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    batch = Batch.build(1, [taught()])
    assert teacher_top_logprobs(batch, batch.to_torch(), ["chat"], vocabulary=29).ids.shape == (6, 3)
    with pytest.raises(InvalidGroup, match=r"has token 28 of the teacher.*the model has 28 tokens: both need the same"):
        teacher_top_logprobs(batch, batch.to_torch(), ["chat"], vocabulary=28)


def test_samples_without_logprobs_are_distilled_as_the_others() -> None:
    group = taught()
    absent = [replace(one, segments=(replace(one.segments[0], logprobs=absent_logprobs(4)),)) for one in group.samples]
    batch = Batch.build(1, [replace(group, samples=tuple(absent))])
    [(micro, left_out)] = leave_out_absent(batch, batch.micro_batches(100), SETTINGS)
    assert left_out == {}
    assert_equal(gradients(tiny_qwen3(), batch, SETTINGS), gradients(tiny_qwen3(), Batch.build(1, [group]), SETTINGS))
    assert int(micro.loss_mask.sum()) == 6


def test_without_a_teacher_it_is_refused() -> None:
    policy_loss(tiny_qwen3(), Batch.build(1, [others()]).to_torch(), LossSettings())
    with pytest.raises(ConfigError, match=r"needs OtherLogprobs\(teacher_top="):
        policy_loss(tiny_qwen3(), Batch.build(1, [taught()]).to_torch(), SETTINGS)


def test_a_choice_of_tokens_without_distillation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"distilled_tokens = 'top_k': loss 'ppo' .* set distillation too"):
        LossSettings.model_validate({"distilled_tokens": "top_k"})


def test_the_learner_passes_the_tokens_of_the_teacher_on(tmp_path: Path) -> None:
    tiny_qwen3().save_pretrained(tmp_path / "model")

    def learn(loss: dict[str, Any], chunk: int = 0) -> float:
        values = {"model": tmp_path / "model", "output": tmp_path / "out", "steps": 1, "loss": loss}
        settings = TrainerSettings.model_validate({**values, "logprob_chunk": chunk})
        learner, metrics = Learner(settings, None, Ranks()), LossMetrics()
        assert learner.gradients(Batch.build(1, [taught()]), metrics, None, threading.Event())
        return metrics.loss

    assert learn({}) == 0  # equal rewards
    found = learn({"distillation": {"chat": 1.0}, "distilled_tokens": "top_k"})
    assert found > 0
    assert learn({"distillation": {"chat": 1.0}, "distilled_tokens": "top_k"}, chunk=2) == pytest.approx(
        found, abs=1e-6
    )
