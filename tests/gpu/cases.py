"""What is run on a machine with GPUs: `python -m gpu` runs each case in a separate process."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.values.rollouts import Int32Array, Segment
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS
from rollq.buffer.weights.probe import Probe, tolerance_of
from rollq.consumer import Batch, MicroBatch, replay_experts
from rollq.consumer.objective.token_logprobs import token_logprobs
from rollq.consumer.weights.checkpoint_format import to_checkpoint_format
from rollq.consumer.weights.nccl import NcclRendezvous
from rollq.consumer.weights.sender import Sender
from rollq.consumer.weights.sources import probe_of
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import Completion, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import BroadcastReceiver
from rollq.workers.engines.registry import make_engine
from support.consumer_groups import make_group, make_sample
from support.model_families import FAMILIES, VOCABULARY, make_model  # not vllm_run, which sets vLLM up for CPUs

CONTEXT_TOKENS = 1024
MOST_SHOWN = 200
"""Characters of an error."""
GPU_ARGS = {"gpu_memory_utilization": 0.3}
CPU_ARGS = {"kv_cache_memory_bytes": 64 << 20}
SWAPS = ((0, SwapMode.ABORT), (1, SwapMode.KEEP), (2, SwapMode.WAIT))


Differences = np.ndarray[Any, np.dtype[np.float64]]
"""Of logprobs, float64 [R] in nats."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a case runs: a torch device (`cuda`, `cpu`), and a folder for its models."""

    device: str
    folder: Path

    def options(self, model: Path, dtype: str, **engine_args: Any) -> dict[str, Any]:
        """Options of engine `vllm`."""
        usual = {"max_model_len": CONTEXT_TOKENS, "enforce_eager": True}
        sizes = CPU_ARGS if self.device == "cpu" else GPU_ARGS
        return {"model": model, "dtype": dtype, "engine_args": usual | sizes | engine_args}


@dataclass(frozen=True, slots=True)
class Case:
    """`run` returns what it measured, by name. It raises when something is wrong."""

    about: str
    gpus: int
    run: Callable[[Machine], Mapping[str, str]]


Scenario = Callable[[EngineHost, dict[str, str]], Awaitable[None]]
"""What is done with an engine; it adds what it measures."""


class Reference:
    """The model of a trainer on the same device: what an engine is compared with."""

    def __init__(self, machine: Machine, folder: Path, dtype: str) -> None:
        self._device = machine.device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(machine.device).eval()

    def probe(self) -> Probe:
        """The probe that a trainer would publish."""
        return probe_of(self._model)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors that a trainer would send."""
        return to_checkpoint_format(self._model, self._model.state_dict())

    def differences(self, prompt: Int32Array, completion: Completion) -> Differences:
        """How far the completion's logprobs are from this model's, float64 [R] in nats."""
        ids = torch.from_numpy(np.concatenate([prompt, completion.ids])).long().to(self._device)
        with torch.no_grad():
            logprobs = self._model(ids[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        again = logprobs.gather(-1, ids[len(prompt) :, None]).squeeze(-1).cpu().numpy()
        differences: Differences = np.abs(again.astype(np.float64) - completion.logprobs)
        return differences


async def answers(host: EngineHost) -> list[tuple[Int32Array, Completion]]:
    """A few prompts with their answers."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, length, dtype=np.int32) for length in (5, 50, 200, 400)]
    requests = [Request(prompt, Sampling(max_tokens=100, ignore_eos=True)) for prompt in prompts]
    made = await asyncio.gather(*map(host.generate, requests))
    return list(zip(prompts, made, strict=True))


async def compare(host: EngineHost, reference: Reference) -> Differences:
    """The differences of all tokens of a few answers."""
    return np.concatenate([reference.differences(*pair) for pair in await answers(host)])


def version(number: int) -> WeightsVersion:
    return WeightsVersion(1, number, f"digest-{number}")


def make_qwen3(folder: Path, seed: int) -> Path:
    return make_model(folder, "qwen3", seed)


@contextmanager
def seconds(measured: dict[str, str], name: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    measured[name] = f"{time.monotonic() - started_s:.2f} s"


def with_host(machine: Machine, model: Path, dtype: str, scenario: Scenario, **engine_args: Any) -> dict[str, str]:
    """Run `scenario(host, measured)` over vLLM."""
    measured: dict[str, str] = {}

    async def run() -> None:
        host = EngineHost(lambda: make_engine("vllm", machine.options(model, dtype, **engine_args)), restarts=0)
        with seconds(measured, "start"):
            await host.start()
        try:
            await scenario(host, measured)
        finally:
            await host.close()

    asyncio.run(run())
    return measured


def swaps(machine: Machine, make: Callable[[Path, int], Path], dtype: str, **engine_args: Any) -> dict[str, str]:
    """Swap in every mode. After each swap, the answers must be those of a trainer with the new weights."""
    folders = [make(machine.folder / str(seed), seed) for seed in range(3)]
    quantized = engine_args.get("quantization", dtype)
    allowed = tolerance_of(dtype, quantized)

    async def scenario(host: EngineHost, measured: dict[str, str]) -> None:
        means, largest, probes, pauses = [], [], [], []
        for number, mode in SWAPS:
            reference = Reference(machine, folders[number], dtype)
            pause_s = await host.swap(folders[number], version(number), mode, reference.probe())
            found = await compare(host, reference)
            assert found.mean() <= allowed, f"{mode}: {found.mean():.2g} nats off in the mean, {allowed:g} are allowed"
            means.append(found.mean())
            largest.append(found.max())
            probes.append(host.check.difference if host.check else np.nan)
            pauses.append(pause_s or 0.0)
        measured["tokens off, mean"] = f"{max(means):.2g} nats"
        measured["tokens off, largest"] = f"{max(largest):.2g} nats"
        measured["probe"] = f"{max(probes):.2g} nats, {allowed:g} allowed"
        measured["pause of a swap"] = f"{max(pauses):.3f} s"

    return with_host(machine, folders[0], dtype, scenario, **engine_args)


def sleep_and_wake(machine: Machine) -> dict[str, str]:
    """Sleep, look at the memory, wake, and serve other weights."""
    folders = [make_qwen3(machine.folder / str(seed), seed) for seed in range(2)]

    async def scenario(host: EngineHost, measured: dict[str, str]) -> None:
        used = used_gib()
        with seconds(measured, "sleep"):
            await host.sleep()
        asleep = used_gib()
        with seconds(measured, "wake"):
            await host.wake()
        measured["memory"] = f"{used:.1f} GiB awake, {asleep:.1f} asleep, {used_gib():.1f} awake again"
        assert asleep < used, measured["memory"]
        reference = Reference(machine, folders[1], "bfloat16")
        await host.swap(folders[1], version(1), SwapMode.ABORT, reference.probe())
        found = await compare(host, reference)
        measured["tokens off after waking, mean"] = f"{found.mean():.2g} nats"
        assert found.mean() <= tolerance_of("bfloat16")

    return with_host(machine, folders[0], "bfloat16", scenario, enable_sleep_mode=True)


def used_gib() -> float:
    """Memory of the GPU that is in use, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def families(machine: Machine) -> dict[str, str]:
    """Swap every family in float32."""
    measured = {}
    for family in FAMILIES:

        def make(folder: Path, seed: int, family: str = family) -> Path:
            return make_model(folder, family, seed)

        try:
            found = swaps(Machine(machine.device, machine.folder / family), make, "float32")
            measured[family] = found["tokens off, largest"]
        except Exception as error:  # noqa: BLE001 - the page says which family fails, and why
            measured[family] = f"{type(error).__name__}: {error}".partition("\n")[0][:MOST_SHOWN]
    return measured


def experts(machine: Machine) -> dict[str, str]:
    """Replay the experts that vLLM returns, twice, the second time with prompts from its cache: a trainer in float32
    must come closer to vLLM in bfloat16."""
    folder = make_model(machine.folder / "experts", "qwen3_moe", 0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(machine.device)

    def off(micro: MicroBatch, routing: AbstractContextManager[None]) -> float:
        with torch.no_grad(), routing:
            logprobs = token_logprobs(model, micro).logprobs
        return float((logprobs - micro.behaviour_logprobs[micro.loss_mask]).abs().mean())

    async def scenario(host: EngineHost, measured: dict[str, str]) -> None:
        for prompts in ("new prompts", "cached prompts"):
            segments = [
                Segment(prompt, one.ids, one.logprobs, one.versions, arrays=one.arrays)
                for prompt, one in await answers(host)
            ]
            batch = Batch.build(1, [make_group(*map(make_sample, segments))])
            micro = batch.to_torch(arrays=[ROUTED_EXPERTS]).to(machine.device)
            without, replayed = off(micro, nullcontext()), off(micro, replay_experts(model, micro))
            measured[prompts] = f"{without:.2g} nats off in the mean, {replayed:.2g} with replay"
            assert replayed < without, measured[prompts]

    return with_host(machine, folder, "bfloat16", scenario, enable_return_routed_experts=True)


def broadcast(machine: Machine) -> dict[str, str]:
    """Send weights from the second GPU into vLLM on the first one, over NCCL."""
    torch.cuda.set_device(1)
    folders = [make_qwen3(machine.folder / str(seed), seed) for seed in range(3)]

    async def scenario(host: EngineHost, measured: dict[str, str]) -> None:
        with EmbeddedServer(machine.folder / "server") as server, Buffer.connect(server.url, "gpu") as buffer:
            buffer.create_run()
            sender = Sender(buffer, NcclRendezvous(), address="127.0.0.1", join_s=60, timeout_s=300)
            for number in (1, 2):
                buffer.report_worker("w", {"transfer_ranks": host.transfer_ranks, "state": "serving"})
                reference = Reference(Machine("cuda:1", machine.folder), folders[number], "bfloat16")
                stored = sender.announce(reference.state_dict(), number, reference.probe())
                live = LiveModel(epoch=1, version=number, uri=stored.uri, digest=stored.digest)
                sending = asyncio.create_task(asyncio.to_thread(sender.send))
                with seconds(measured, f"broadcast {number}"):
                    incoming = await BroadcastReceiver(BufferCalls(buffer), "w").enter(live, int(live.uri[5:]))
                    await host.receive(incoming, version(number), SwapMode.KEEP)
                await sending
                found = await compare(host, reference)
                measured["tokens off, mean"] = f"{found.mean():.2g} nats"
                assert found.mean() <= tolerance_of("bfloat16")

    transfer = {"weight_transfer_config": {"backend": "nccl"}}
    return with_host(machine, folders[0], "bfloat16", scenario, **transfer)


CASES: Mapping[str, Case] = {
    "float32": Case("vLLM in float32", 1, lambda at: swaps(at, make_qwen3, "float32")),
    "bfloat16": Case("vLLM in bfloat16", 1, lambda at: swaps(at, make_qwen3, "bfloat16")),
    "graphs": Case(
        "CUDA graphs: swaps replace weights under graphs that were captured before",
        1,
        lambda at: swaps(at, make_qwen3, "bfloat16", enforce_eager=False),
    ),
    "fp8": Case(
        "weights quantized to fp8 by vLLM", 1, lambda at: swaps(at, make_qwen3, "bfloat16", quantization="fp8")
    ),
    "sleep": Case("sleep, wake, and then a swap", 1, sleep_and_wake),
    "families": Case("every model family in float32", 1, families),
    "experts": Case("routed experts that a trainer replays", 1, experts),
    "broadcast": Case("weights sent from one GPU into vLLM on another, over NCCL", 2, broadcast),
    "two ranks": Case(
        "tensor parallelism over two GPUs", 2, lambda at: swaps(at, make_qwen3, "bfloat16", tensor_parallel_size=2)
    ),
}
