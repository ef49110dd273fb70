"""Faults planted into a real vLLM are noticed before its tokens leave, ten times of ten."""

import asyncio
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from rollq.buffer.weights.probe import Probe
from rollq.consumer.weights.sources import probe_of
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, Request, Sampling, SwapMode
from rollq.workers.engines.vllm import scoring
from rollq.workers.engines.weights_check import WeightsRejected
from support.adapters import lora, merged
from support.model_families import make_model
from support.staged_worker import title
from support.vllm_run import make_qwen3, options, random_prompt, version, with_host
from support.waiting import PATIENCE_S

CONTEXT_TOKENS = 1024
Tensors = dict[str, torch.Tensor]
TIMES = 10


def one_layer_not_loaded(old: Tensors, new: Tensors) -> Tensors:
    return {name: old[name] if ".layers.1." in name else tensor for name, tensor in new.items()}


def half_a_shard(old: Tensors, new: Tensors) -> Tensors:
    name = "model.layers.0.self_attn.q_proj.weight"
    half = len(new[name]) // 2
    return {**new, name: torch.cat([new[name][:half], old[name][half:]])}


def rounded_to_bfloat16(old: Tensors, new: Tensors) -> Tensors:
    return {name: tensor.bfloat16().float() for name, tensor in new.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parent = tmp_path_factory.mktemp("models")
    return [make_qwen3(parent / str(seed), seed) for seed in range(1 + TIMES)]


@pytest.fixture(scope="module")
def probes(folders: list[Path]) -> list[Probe]:
    return [probe_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)) for folder in folders]


def test_weights_that_are_loaded_wrongly_are_noticed(folders: list[Path], probes: list[Probe], tmp_path: Path) -> None:
    old = load_file(folders[0] / "model.safetensors")

    async def scenario(host: EngineHost) -> None:
        for fault in (one_layer_not_loaded, half_a_shard, rounded_to_bfloat16):
            for number in range(1, 1 + TIMES):
                new = load_file(folders[number] / "model.safetensors")
                save_file(fault(old, new), tmp_path / "model.safetensors")
                with pytest.raises(WeightsRejected, match=f"weights of version {number}: the engine.s logprobs differ"):
                    await host.swap(tmp_path, version(number), SwapMode.ABORT, probes[number])
                assert not host.ready

    with_host(options(folders[0]), scenario)


@pytest.mark.slow  # a model that is large for a test
def test_a_wrong_expert_of_128_is_noticed_in_bfloat16(tmp_path: Path) -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    folder, bad = make_model(tmp_path / "right", "qwen3_moe", 0, **experts), tmp_path / "wrong"
    bad.mkdir()
    new = load_file(folder / "model.safetensors")
    probe = probe_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))

    async def scenario(host: EngineHost) -> None:
        for number in range(1, 1 + TIMES):
            name, other = (f"model.layers.1.mlp.experts.{one}.down_proj.weight" for one in (number, number + 1))
            save_file({**new, name: new[other], other: new[name]}, bad / "model.safetensors")
            with pytest.raises(WeightsRejected, match=rf"of version {number}: .*experts\.down_proj\[{number}\]"):
                await host.swap(bad, version(number), SwapMode.ABORT, probe)
            await host.swap(folder, version(number), SwapMode.ABORT, probe)
            assert host.ready

    with_host(options(folder, max_model_len=CONTEXT_TOKENS) | {"dtype": "bfloat16"}, scenario)


def test_a_stale_cache_of_prompts_is_noticed(
    folders: list[Path], probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of all versions have one salt, and a swap leaves the cache."""
    pause = AsyncLLM.pause_generation

    def name_of(_: Any) -> str:
        return "the same"

    async def pause_only(llm: AsyncLLM, *, mode: Any, clear_cache: bool) -> None:
        await pause(llm, mode=mode, clear_cache=False)

    async def scenario(host: EngineHost) -> None:
        monkeypatch.setattr(scoring, "name_of", name_of)
        await host.swap(folders[0], version(0), SwapMode.ABORT, probes[0])
        assert host.ready
        monkeypatch.setattr(AsyncLLM, "pause_generation", pause_only)
        for number in range(1, 1 + TIMES):
            with pytest.raises(WeightsRejected, match=f"weights of version {number}: the engine.s prompt cache"):
                await host.swap(folders[number], version(number), SwapMode.ABORT, probes[number])

    with_host(options(folders[0], enable_prefix_caching=True), scenario)


def test_a_vllm_that_breaks_while_it_is_checked_counts_as_dead(
    folders: list[Path], probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __aiter__(self) -> Self:
            return self

        async def __anext__(self) -> None:
            raise EngineGenerateError from RuntimeError("its worker is gone")

    async def scenario(host: EngineHost) -> None:
        monkeypatch.setattr(AsyncLLM, "generate", lambda *_, **__: Broken())
        with pytest.raises(EngineDead, match="its worker is gone"):
            await host.swap(folders[1], version(1), SwapMode.RESTART, probes[1])
        assert not host.ready

    with_host(options(folders[0]), scenario)


@pytest.mark.slow  # the test before has an engine that dies while it is checked
def test_a_vllm_that_dies_just_after_its_start_is_not_waited_for(
    folders: list[Path], probes: list[Probe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first answer to the worker never comes."""

    async def die(_: AsyncLLM) -> None:
        cores = [child for child in psutil.Process().children() if "EngineCore" in title(child)]
        max(cores, key=lambda core: core.create_time()).kill()  # there may be engines of other tests
        await asyncio.Event().wait()

    async def scenario(host: EngineHost) -> None:
        monkeypatch.setattr(AsyncLLM, "get_supported_tasks", die)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(EngineDead, match="vLLM did not start with other weights"):
                await host.swap(folders[1], version(1), SwapMode.RESTART, probes[1])
        assert not host.ready

    with_host(options(folders[0]), scenario)


def test_an_adapter_on_another_base_is_noticed(folders: list[Path], tmp_path: Path) -> None:
    adapters = [lora(tmp_path / f"adapter-{number}", folders[0], number) for number in range(1 + TIMES)]

    def probe_on(base: Path, adapter: Path) -> Probe:
        folder = merged(tmp_path / f"{base.name}-{adapter.name}", base, adapter)
        return probe_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))

    async def scenario(host: EngineHost) -> None:
        for number, adapter in enumerate(adapters):
            await host.swap(adapter, version(number), SwapMode.KEEP, probe_on(folders[0], adapter))
            assert host.check is not None
            assert host.check.difference < host.check.tolerance / 10
        for number in range(1, 1 + TIMES):
            probe = probe_on(folders[number], adapters[number])
            with pytest.raises(WeightsRejected, match=f"weights of version {number}: the engine.s logprobs differ"):
                await host.swap(adapters[number], version(number), SwapMode.KEEP, probe)

    with_host(options(folders[0], enable_lora=True, max_lora_rank=8), scenario)


@pytest.mark.parametrize("mode", [SwapMode.KEEP, SwapMode.ABORT])
def test_a_check_does_not_wait_for_requests_of_an_engine_that_is_full(
    folders: list[Path], probes: list[Probe], mode: SwapMode
) -> None:
    """Twice as many long requests as vLLM runs are under way: none ends between the swap and its check."""
    rng = np.random.default_rng(0)
    ended = 0

    async def scenario(host: EngineHost) -> None:
        async def ask() -> None:
            nonlocal ended
            await host.generate(Request(random_prompt(rng, 30), Sampling(max_tokens=3000, ignore_eos=True)))
            ended += 1

        running = [asyncio.create_task(ask()) for _ in range(4)]
        await asyncio.sleep(1)
        aborted = 4 if mode is SwapMode.ABORT else 0
        await host.swap(folders[1], version(1), mode, probes[1])
        assert ended <= aborted
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    with_host(options(folders[0], max_num_seqs=2), scenario)


def test_a_probe_may_have_other_prompts(folders: list[Path], probes: list[Probe]) -> None:
    """Fewer than those that are always the same, more, and too long for the engine, which runs one at a time."""
    all_of = probes[1]
    first = Probe(all_of.dtype, all_of.prompts[:1], all_of.logprobs[:1])
    twice = Probe(all_of.dtype, [*all_of.prompts, *all_of.prompts], [*all_of.logprobs, *all_of.logprobs])
    long = Probe(all_of.dtype, [np.ones(600, np.int32)], [np.ones(599, np.float32)])

    async def scenario(host: EngineHost) -> None:
        for number, probe in enumerate((all_of, first, twice), 1):
            await host.swap(folders[1], version(number), SwapMode.KEEP, probe)
            assert host.ready
            assert host.check is not None
            assert host.check.difference < host.check.tolerance / 10
        with pytest.raises(WeightsRejected, match="version 4 cannot be checked: vLLM refuses the prompts"):
            await host.swap(folders[1], version(4), SwapMode.KEEP, long)
        await host.swap(folders[1], version(5), SwapMode.KEEP, all_of)
        assert host.ready

    with_host(options(folders[0], max_num_seqs=1, max_model_len=512, enable_prefix_caching=False), scenario)
