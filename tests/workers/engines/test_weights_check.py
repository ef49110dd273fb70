"""Weights that an engine serves wrongly are noticed before a group is leased, and none of their tokens leaves."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rollq.buffer.errors import WeightsError
from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.buffer.weights.probe import BitSums, Probe, difference, probe_prompts, tolerance_of, wrong_tensors
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.engines.weights_check import WeightsRejected
from rollq.workers.engines.weights_trial import before
from support.model_families import make_model

Tensors = dict[str, torch.Tensor]
SEEDS = range(1, 11)
EXPERT = "model.layers.1.mlp.experts.{}.down_proj.weight"


def one_layer_not_loaded(old: Tensors, new: Tensors) -> Tensors:
    return {name: old[name] if ".layers.1." in name else tensor for name, tensor in new.items()}


def experts_permuted(old: Tensors, new: Tensors) -> Tensors:
    return {**new, EXPERT.format(0): new[EXPERT.format(1)], EXPERT.format(1): new[EXPERT.format(0)]}


def head_of_the_old_weights(old: Tensors, new: Tensors) -> Tensors:
    return {**new, "lm_head.weight": old["lm_head.weight"]}


def half_a_shard(old: Tensors, new: Tensors) -> Tensors:
    """Of one matrix, the second half of the rows is that of the old weights."""
    name = "model.layers.0.self_attn.q_proj.weight"
    half = len(new[name]) // 2
    return {**new, name: torch.cat([new[name][:half], old[name][half:]])}


def rounded_to_bfloat16(old: Tensors, new: Tensors) -> Tensors:
    return {name: tensor.bfloat16().float() for name, tensor in new.items()}


def one_nan(old: Tensors, new: Tensors) -> Tensors:
    tensor = new["model.layers.0.self_attn.o_proj.weight"].clone()
    tensor[3, 5] = float("nan")
    return {**new, "model.layers.0.self_attn.o_proj.weight": tensor}


FAULTS = [
    one_layer_not_loaded, experts_permuted, head_of_the_old_weights, half_a_shard, rounded_to_bfloat16, one_nan,
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """A mixture of experts with different weights, eleven times."""
    return [make_model(tmp_path_factory.mktemp(f"moe-{seed}"), "qwen3_moe", seed) for seed in (0, *SEEDS)]


def probe_in(folder: Path, dtype: torch.dtype = torch.float32) -> Probe:
    return probe_of(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


@pytest.fixture(scope="module")
def moe_of_128(tmp_path_factory: pytest.TempPathFactory) -> Path:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16}
    return make_model(tmp_path_factory.mktemp("moe-of-128"), "qwen3_moe", 0, **experts)


def version(number: int) -> WeightsVersion:
    return WeightsVersion(1, number, f"digest-{number}")


def with_host(folder: Path, scenario: Callable[[EngineHost], Any], dtype: Any = "float32") -> Any:
    settings = TransformersSettings(model=folder, device="cpu", dtype=dtype)

    async def run() -> Any:
        host = EngineHost(lambda: TransformersEngine(settings), restarts=0)
        await host.start()
        try:
            await host.swap(folder, version(0), SwapMode.ABORT, probe_in(folder))
            return await scenario(host)
        finally:
            await host.close()

    return asyncio.run(run())


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed_ten_times_of_ten(
    models: Sequence[Path], tmp_path: Path, fault: Callable[[Tensors, Tensors], Tensors]
) -> None:
    old = load_file(models[0] / "model.safetensors")
    leasing: list[bool] = []

    async def scenario(host: EngineHost) -> None:
        for number in SEEDS:
            new, probe = load_file(models[number] / "model.safetensors"), probe_in(models[number])
            save_file(fault(old, new), tmp_path / "model.safetensors")
            with pytest.raises(WeightsRejected, match=f"weights of version {number}: "):
                await host.swap(tmp_path, version(number), SwapMode.KEEP, probe)
            assert host.ready is False
            await host.swap(models[number], version(number), SwapMode.KEEP, probe)
            check = host.check
            assert check is not None
            assert check.difference < check.tolerance / 10
            leasing.append(host.ready)
        assert all(leasing)

    with_host(models[0], scenario)


def two_of_128_exchanged(new: Tensors, number: int) -> Tensors:
    one, other = EXPERT.format(10 * number), EXPERT.format(10 * number + 1)
    return {**new, one: new[other], other: new[one]}


def one_of_128_zeroed(new: Tensors, number: int) -> Tensors:
    name = EXPERT.format(10 * number)
    return {**new, name: torch.zeros_like(new[name])}


def one_of_128_not_loaded(new: Tensors, number: int) -> Tensors:
    name = EXPERT.format(10 * number).replace("down_proj", "up_proj")
    return {**new, name: new[name] + 0.01}


@pytest.mark.long
@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [two_of_128_exchanged, one_of_128_zeroed, one_of_128_not_loaded])
@pytest.mark.parametrize("seeds", [SEEDS[:2], pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len)
def test_a_wrong_expert_of_128_is_noticed_in_bfloat16_every_time(
    moe_of_128: Path,
    tmp_path: Path,
    fault: Callable[[Tensors, int], Tensors],
    trained: torch.dtype,
    seeds: Sequence[int],
) -> None:
    new, probe = load_file(moe_of_128 / "model.safetensors"), probe_in(moe_of_128, trained)

    async def scenario(host: EngineHost) -> None:
        for number in seeds:
            save_file(fault(new, number), tmp_path / "model.safetensors")
            with pytest.raises(WeightsRejected, match=rf"of version {number}: .*experts\.\w+_proj\[{10 * number}\]"):
                await host.swap(tmp_path, version(number), SwapMode.KEEP, probe)
            assert not host.ready
            await host.swap(moe_of_128, version(number), SwapMode.KEEP, probe)
            assert host.ready

    with_host(moe_of_128, scenario, dtype="bfloat16")


def test_sums_of_float16_are_not_compared_with_those_of_other_dtypes(moe_of_128: Path) -> None:
    async def scenario(host: EngineHost) -> None:
        await host.swap(moe_of_128, version(1), SwapMode.KEEP, probe_in(moe_of_128, torch.float32))
        assert host.ready

    with_host(moe_of_128, scenario, dtype="float16")


def test_a_part_of_a_tensor_is_not_compared_with_the_whole() -> None:
    whole = {"a": BitSums((4, 2), (7,)), "b": BitSums((2, 1, 1), (1, 2)), "c": BitSums((1,), (3,))}
    assert wrong_tensors(whole, {"a": BitSums((8,), (9,)), "b": BitSums((2, 1, 1), (1, 3))}) == ["b[1]"]


def test_a_trainer_does_not_publish_weights_that_are_not_finite(models: Sequence[Path]) -> None:
    model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(WeightsError, match="not finite"):
        probe_of(model)


def test_a_probe_of_tokens_that_the_engine_lacks_is_refused(models: Sequence[Path]) -> None:
    probe = probe_in(models[1])
    probe = Probe(probe.dtype, [prompt + 100_000 for prompt in probe.prompts], probe.logprobs)

    async def scenario(host: EngineHost) -> None:
        with pytest.raises(WeightsRejected, match=r"version 1 cannot be checked: their probe holds token 1\d{5}"):
            await host.swap(models[1], version(1), SwapMode.ABORT, probe)
        assert not host.ready

    with_host(models[0], scenario)


def test_weights_that_are_not_finite_are_noticed_without_a_probe(models: Sequence[Path], tmp_path: Path) -> None:
    old = load_file(models[0] / "model.safetensors")
    save_file(one_nan(old, old), tmp_path / "model.safetensors")

    async def scenario(host: EngineHost) -> None:
        with pytest.raises(WeightsRejected, match="by inf nats"):
            await host.swap(tmp_path, version(1), SwapMode.KEEP)
        assert not host.ready

    with_host(models[0], scenario)


def test_no_token_of_rejected_weights_leaves(models: Sequence[Path], tmp_path: Path) -> None:
    """Requests run through the swap, and others come while the weights are checked."""
    old, new = (load_file(models[number] / "model.safetensors") for number in (0, 1))
    save_file(one_layer_not_loaded(old, new), tmp_path / "model.safetensors")
    old_probe, new_probe = probe_in(models[0]), probe_in(models[1])
    reported: list[Completion] = []
    completions: list[Completion] = []

    def any_aborted() -> bool:
        return any(completion.finish_reason is FinishReason.ABORT for completion in completions)

    async def scenario(host: EngineHost) -> None:
        def report(so_far: Completion) -> None:
            if host.trusts(so_far.versions):
                reported.append(so_far)

        async def ask_until_aborted() -> None:
            """A slow swap outlasts a request, so that there is always another."""
            while not any_aborted():
                request = Request(np.arange(40, 60, dtype=np.int32), Sampling(max_tokens=600), report=report)
                completions.append(await host.generate(request))

        running = [asyncio.create_task(ask_until_aborted()) for _ in range(4)]
        while not reported:
            await asyncio.sleep(0.01)
        with pytest.raises(WeightsRejected):
            await host.swap(tmp_path, version(1), SwapMode.KEEP, new_probe)
        await host.swap(models[0], version(0), SwapMode.ABORT, old_probe)
        await asyncio.gather(*running)

    with_host(models[0], scenario)
    assert any_aborted()
    with_tokens = [completion for completion in completions if len(completion.ids) > 0]
    without_tokens = [completion for completion in completions if len(completion.ids) == 0]
    assert with_tokens
    for completion in [*with_tokens, *reported]:
        assert {span.version for span in completion.versions} == {0}
        assert len(completion.ids) == len(completion.logprobs) == sum(span.tokens for span in completion.versions) > 0
    for completion in without_tokens:  # they began with the rejected weights, or not at all
        assert completion.finish_reason is FinishReason.ABORT
        assert len(completion.logprobs) == sum(span.tokens for span in completion.versions) == 0
        assert {span.version for span in completion.versions} <= {0}


def test_tokens_before_the_first_rejected_one_are_kept() -> None:
    spans = (VersionSpan(1, 3, 2), VersionSpan(1, 4, 3), VersionSpan(1, 3, 1))
    made = Completion(
        np.arange(6, dtype=np.int32), np.zeros(6, np.float32), spans, FinishReason.STOP, {"experts": np.arange(6)}
    )
    assert before(made, set()) is made
    cut = before(made, {(1, 4)})
    assert (cut.ids.tolist(), cut.versions, cut.finish_reason) == ([0, 1], spans[:1], FinishReason.ABORT)
    assert cut.arrays["experts"].tolist() == [0, 1]
    assert len(before(made, {(1, 3)}).ids) == 0


def test_a_probe_travels_as_text_and_anything_else_is_refused() -> None:
    prompts = probe_prompts(258)
    sums = {"experts": BitSums((2, 3, 4), (-(2**40), 5))}
    probe = Probe("bfloat16", prompts, [np.full(len(one) - 1, -1.5, np.float32) for one in prompts], sums)
    again = Probe.decode(probe.encode())
    assert again.dtype == "bfloat16"
    assert again.sums == sums
    assert Probe.decode(b'{"dtype": "x", "prompts": [[1, 2]], "logprobs": [[0.0]]}').sums == {}
    assert difference(again.logprobs, probe.logprobs) == 0
    assert all((one == other).all() for one, other in zip(again.prompts, prompts, strict=True))
    wrong: Sequence[Mapping[str, Any]] = [
        {}, {"dtype": "x", "prompts": [], "logprobs": []}, {"dtype": "x", "prompts": [[1, 2]], "logprobs": [[]]},
        {"dtype": "x", "prompts": [[1, -2]], "logprobs": [[0.0]]}, {"dtype": "x", "prompts": [[1, 2]], "logprobs": []},
        {"dtype": "x", "prompts": [[1, 2]], "logprobs": [[None]]},
        {"dtype": "x", "prompts": [[1, 2**31]], "logprobs": [[0.0]]},
        {"dtype": "x", "prompts": [[1] * 1025], "logprobs": [[0.0] * 1024]},
        {"dtype": "x", "prompts": [[1, 2]], "logprobs": [[0.0]], "sums": {"experts": [2, 3]}},
    ]  # fmt: skip
    for raw in (b"", b"[]", *(repr(dict(one)).replace("'", '"').encode() for one in wrong)):
        with pytest.raises(WeightsError, match="probe"):
            Probe.decode(raw)


def test_a_probe_leaves_each_part_of_the_model_in_its_mode(models: Sequence[Path]) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32).train()
    model.lm_head.eval()
    before = [module.training for module in model.modules()]
    probe_of(model)
    assert [module.training for module in model.modules()] == before


def test_the_coarser_dtype_sets_the_tolerance() -> None:
    assert tolerance_of("float32", "float32") < tolerance_of("float32", "bfloat16") < tolerance_of("bfloat16", "fp8")
    assert difference([np.zeros(2, np.float32)], [np.zeros(1, np.float32)]) == np.inf
    assert difference([np.zeros(2, np.float32)], [np.array([0, np.nan], np.float32)]) == np.inf
