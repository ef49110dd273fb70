"""The gradient norms of TRL on batches of rollq are those of rollq's learner, and of a loop that knows only samples."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.values.rollouts import Group
from rollq.consumer import Batch, Consumer
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.objective.metrics import LossMetrics
from rollq.consumer.objective.policy_loss import OtherLogprobs, policy_loss
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.learner import Learner
from rollq.consumer.trainer.ranks import Ranks
from rollq.integrations import trl
from rollq.integrations.trl.inputs import grpo_inputs
from support.consumer_groups import random_groups
from support.manual_worker import TEMPERATURE, HandWorker, make_run
from support.tiny_qwen3 import flat_gradient, tiny_qwen3
from support.trl_runs import Norms, config, train

STEPS = 10
RATE = 3e-3
TOLERANCE = 1e-4
"""Relative; 3e-6 was the largest difference seen."""


class SelfFed(Consumer):
    """Samples two groups before each batch, from the weights of `lag` steps before, and keeps the batches."""

    worker: HandWorker
    lag: int
    batches: list[Batch]

    def __next__(self) -> Batch:
        self.worker.produce(2 if self.step > 1 else 2 + 2 * self.lag)
        batch = super().__next__()
        self.batches.append(batch)
        return batch


def plain_norms(batches: list[Batch], model_folder: Path) -> list[float]:
    """A trainer without rollq: token by token from the samples, one after the other."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    norms = []
    for batch in batches:
        total = sum(len(sample.segments[0].response_ids) for group in batch.groups for sample in group.samples)
        optimizer.zero_grad()
        for group in batch.groups:
            rewards = torch.tensor([sample.reward for sample in group.samples])
            scaled = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)
            for sample, advantage in zip(group.samples, scaled, strict=True):
                (segment,) = sample.segments
                prompt, response = torch.tensor(segment.prompt_ids), torch.tensor(segment.response_ids).long()
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
                logprobs = logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1)
                ratio = (logprobs - torch.tensor(segment.logprobs)).exp()
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / total
                loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms


def rollq_norms(batches: list[Batch], model_folder: Path, output: Path) -> list[float]:
    settings = TrainerSettings(model=model_folder, output=output, steps=STEPS, learning_rate=RATE)
    learner = Learner(settings, None, Ranks())
    norms = []
    for batch in batches:
        learner.begin()
        assert learner.gradients(batch, LossMetrics(), None, threading.Event())
        norms.append(learner.update(batch.step) or 0.0)
    return norms


@pytest.mark.parametrize("lag", [0, 1])
def test_ten_gradient_norms_are_those_of_rollq_and_of_plain_pytorch(
    lag: int, server_url: str, run_name: str, model_folder: Path, tmp_path: Path
) -> None:
    args, norms = config(tmp_path / "trl", max_steps=STEPS, temperature=TEMPERATURE, save_strategy="no"), Norms()
    with Buffer.connect(server_url, run_name) as buffer:
        make_run(buffer, max_staleness=1)
        with SelfFed.connect(server_url, run=run_name, weights=model_folder) as consumer:
            consumer.worker, consumer.lag, consumer.batches = HandWorker(buffer, tiny_qwen3(1), tmp_path), lag, []
            train(model_folder, args, consumer, norms)
            batches = consumer.batches
            ages = [int(batch.to_torch().staleness.max()) for batch in batches]
            found = list(norms.by_step.values())
            plain = plain_norms(batches, model_folder)
    assert ages == [0] + [lag] * (STEPS - 1)
    own = rollq_norms(batches, model_folder, tmp_path)
    assert found == pytest.approx(own, rel=TOLERANCE)
    assert found == pytest.approx(plain, rel=TOLERANCE)


@pytest.fixture(scope="module")
def trainer(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> "trl.RollqGRPOTrainer":
    """A trainer of which only the loss is used."""
    args = config(tmp_path_factory.mktemp("trl"), temperature=0.8, max_completion_length=64)
    idle: Any = SimpleNamespace(step=1)
    return trl.RollqGRPOTrainer(str(model_folder), args, idle, max_tokens=100)


@pytest.mark.parametrize(
    ("loss_type", "aggregation"), [("dapo", "token"), ("grpo", "sequence"), ("dr_grpo", "constant")]
)
@pytest.mark.parametrize("count", [3, 20])
def test_a_loss_of_trl_has_the_gradient_of_the_batch_however_it_is_split(
    trainer: "trl.RollqGRPOTrainer", loss_type: str, aggregation: str, count: int
) -> None:
    """The batch has failed samples, tokens of the environment, and for all but one loss samples of two segments."""
    batch = Batch.build(1, random_groups(3))
    if loss_type == "grpo":
        batch = Batch.build(1, [*one_segment_each(random_groups(3))])
    args = trainer.args
    args.loss_type = trainer.loss_type = loss_type
    args.gradient_accumulation_steps = args.steps_per_generation = trainer.current_gradient_accumulation_steps = count
    trainer.model.zero_grad()
    trainer.model.train()
    for micro in batch.micro_batches(200, count=count, padded=True):
        trainer.compute_loss(trainer.model, grpo_inputs(micro, args, 1)).backward()
    expected = tiny_qwen3()
    constant = {"constant_tokens": 64} if aggregation == "constant" else {}
    settings = LossSettings.model_validate({"aggregation": aggregation, **constant})
    policy_loss(expected, batch.to_torch(), settings).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(flat_gradient(trainer.model), flat_gradient(expected), rtol=1e-4, atol=1e-6)


def test_a_divergence_from_the_initial_model_has_the_gradient_of_rollq(model_folder: Path, tmp_path: Path) -> None:
    args = config(tmp_path, temperature=0.8, beta=0.1, use_bias_correction_kl=False)
    idle: Any = SimpleNamespace(step=1)
    trainer = trl.RollqGRPOTrainer(str(model_folder), args, idle, max_tokens=100)
    model, reference = tiny_qwen3(1), tiny_qwen3()
    trainer.model.load_state_dict(model.state_dict())
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    (micro,) = Batch.build(1, random_groups(3)).micro_batches(10_000, count=1, padded=True)
    inputs = trainer._prepare_inputs(grpo_inputs(micro, args, 1))
    trainer.compute_loss(trainer.model, inputs).backward()
    known = token_logprobs(reference, micro).logprobs.detach()
    policy_loss(model, micro, LossSettings(kl_coefficient=0.1), others=OtherLogprobs(reference=known)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(flat_gradient(trainer.model), flat_gradient(model), rtol=1e-4, atol=1e-6)


def one_segment_each(groups: list[Group]) -> Iterator[Group]:
    for group in groups:
        yield replace(group, samples=[replace(sample, segments=sample.segments[:1]) for sample in group.samples])
