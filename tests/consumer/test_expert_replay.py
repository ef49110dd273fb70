"""Replayed experts on tiny mixtures: the trainer's logprobs against those of an engine that routed otherwise."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS, number_experts
from rollq.consumer import Batch, MicroBatch, replay_experts
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.workers.engines.protocol import Completion, Request, Sampling
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from support.consumer_groups import make_group, make_sample, make_segment
from support.model_families import make_model

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")
PROMPTS = (5, 9, 9, 17)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe"), request.param, seed=0)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("moe"), "qwen3_moe", seed=0)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def generate(folder: Path, dtype: str = "bfloat16") -> tuple[Sample, ...]:
    """Samples of an engine that records its experts."""
    settings = TransformersSettings.model_validate(
        {"model": folder, "dtype": dtype, "device": "cpu", "return_routed_experts": True}
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 258, length, dtype=np.int32) for length in PROMPTS]

    async def run() -> Sequence[Completion]:
        engine = TransformersEngine(settings)
        await engine.start()
        requests = [
            Request(prompt, Sampling(max_tokens=48, seed=seed, ignore_eos=True)) for seed, prompt in enumerate(prompts)
        ]
        completions = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return completions

    return tuple(
        Sample(
            (Segment(prompt, one.ids, one.logprobs, one.versions, arrays=one.arrays),),
            SampleStatus.COMPLETED,
            FinishReason.LENGTH,
            reward=1.0,
        )
        for prompt, one in zip(prompts, asyncio.run(run()), strict=True)
    )


def micro_batch(samples: Sequence[Sample], *, padded: bool = True) -> MicroBatch:
    batch = Batch.build(1, [make_group(*samples)])
    (micro,) = batch.micro_batches(10_000, padded=padded, arrays=[ROUTED_EXPERTS])
    return micro


def mismatch(model: Any, micro: MicroBatch, routing: AbstractContextManager[None]) -> float:
    """How far the logprobs of `model` are from the engine's, in nats, in the mean."""
    with torch.no_grad(), routing:
        logprobs = token_logprobs(model, micro).logprobs
    return float((logprobs - micro.behaviour_logprobs[micro.loss_mask]).abs().mean())


def with_experts(micro: MicroBatch, experts: torch.Tensor) -> MicroBatch:
    return replace(micro, arrays={ROUTED_EXPERTS: experts})


def own_experts(model: Any, micro: MicroBatch) -> torch.Tensor:
    """The experts that `model` itself chooses for padded rows, numbered from 1, [B, T, layers, top_k]."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    chosen: list[torch.Tensor] = []
    hooks = [router.register_forward_hook(lambda _, __, output: chosen.append(output[-1])) for router in routers]
    with torch.no_grad():
        token_logprobs(model, micro)
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).reshape(*micro.input_ids.shape, len(routers), -1) + 1


def test_logprobs_are_closer_to_the_engines_with_replay_than_without(folder: Path) -> None:
    model, micro = load(folder), micro_batch(generate(folder))
    known = (micro.arrays[ROUTED_EXPERTS] > 0).all(-1).all(-1)
    differs = (own_experts(model, micro).sort(-1).values != micro.arrays[ROUTED_EXPERTS].sort(-1).values).any(-1)
    assert differs[known].any(), "the engine routed as the trainer does, so nothing is tested"
    without = mismatch(model, micro, nullcontext())
    replayed = mismatch(model, micro, replay_experts(model, micro))
    other = float(differs[known].float().mean())
    print(
        f"{type(model).__name__}: {without:.4f} nats without replay, {replayed:.4f} with; {other:.1%} routed otherwise"
    )
    assert replayed < without


def test_every_token_but_the_last_has_the_experts_that_one_forward_pass_chooses(folder: Path) -> None:
    model, micro = load(folder), micro_batch(generate(folder, "float32"))
    own, recorded = own_experts(model, micro), micro.arrays[ROUTED_EXPERTS]
    assert micro.attention_mask is not None
    for row, length in enumerate(micro.attention_mask.sum(1).tolist()):
        torch.testing.assert_close(recorded[row, : length - 1].long(), own[row, : length - 1])
        assert not recorded[row, length - 1 :].any()


def test_decisions_that_agree_change_no_bit_and_unknown_ones_are_the_models(folder: Path) -> None:
    model, micro = load(folder), micro_batch(generate(folder, "float32"))
    plain = token_logprobs(model, micro).logprobs
    for array in (own_experts(model, micro), torch.zeros_like(micro.arrays[ROUTED_EXPERTS])):
        with replay_experts(model, with_experts(micro, array)):
            assert token_logprobs(model, with_experts(micro, array)).logprobs.equal(plain)


def test_packed_rows_replay_as_padded_ones(moe: Path) -> None:
    model, samples = load(moe), generate(moe)
    found = []
    for padded in (False, True):
        micro = micro_batch(samples, padded=padded)
        with torch.no_grad(), replay_experts(model, micro):
            found.append(token_logprobs(model, micro).logprobs)
    torch.testing.assert_close(found[0], found[1], atol=2e-5, rtol=0)


def test_gradients_reach_the_routers_and_only_the_experts_that_are_replayed(moe: Path) -> None:
    model, micro = load(moe), micro_batch(generate(moe))
    forced = torch.full_like(micro.arrays[ROUTED_EXPERTS], 3)
    forced[..., 1] = 6
    with replay_experts(model, with_experts(micro, forced)):
        token_logprobs(model, micro).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    for layer in model.model.layers:
        assert layer.mlp.gate.weight.grad.abs().sum() > 0
        used = layer.mlp.experts.down_proj.grad.flatten(1).any(1).nonzero().flatten().tolist()
        assert used == [2, 5]
        assert "forward" not in vars(layer.mlp.gate)


def test_routers_are_restored_after_an_error(moe: Path) -> None:
    model, micro = load(moe), micro_batch(generate(moe))
    with pytest.raises(RuntimeError, match="later"), replay_experts(model, micro):
        raise RuntimeError("later")
    assert "forward" not in vars(model.model.layers[0].mlp.gate)


@pytest.mark.parametrize("shape", [(2, 3), (1, 2), (2,)])
def test_an_array_of_another_model_is_refused(moe: Path, shape: tuple[int, ...]) -> None:
    experts = np.ones((3, *shape), np.uint8)
    micro = micro_batch([make_sample(make_segment([5], [6, 7], arrays={ROUTED_EXPERTS: experts}))])
    with pytest.raises(InvalidGroup, match="2 layers or more, and chooses 2 of 8"), replay_experts(load(moe), micro):
        pass


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    model = load(make_model(tmp_path, "llama", seed=0))
    micro = micro_batch([make_sample(make_segment([5], [6], arrays={ROUTED_EXPERTS: np.ones((2, 2, 2), np.uint8)}))])
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"), replay_experts(model, micro):
        pass


def test_experts_are_numbered_from_one_in_the_smallest_dtype() -> None:
    chosen = np.array([[[0, 254]]])
    assert number_experts(chosen, 255).dtype == np.uint8
    assert number_experts(chosen + 1, 256).tolist() == [[[2, 256]]]
    assert number_experts(chosen, 128).nbytes == 2
