"""Weights that a trainer sends into a real vLLM, with gloo in place of NCCL, which needs GPUs."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.broadcast_log import BroadcastLog
from rollq.consumer.weights.sender import Sender
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, Request, Sampling, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import BroadcastReceiver, TooLate
from rollq.workers.engines.registry import make_engine
from support import gloo_transfer
from support.gloo_group import ADDRESS, GlooProcessGroup, GlooRendezvous
from support.vllm_run import SharedEngine, forward_logprobs, make_qwen3, options
from support.waiting import PATIENCE_S

TRANSFER = {"weight_transfer_config": {"backend": "gloo"}}
TOLERANCE = 1e-4
PROMPT = np.arange(20, 60, dtype=np.int32)


@pytest.fixture(scope="module", autouse=True)
def gloo_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's processes know the backend `gloo`."""
    folder = tmp_path_factory.mktemp("plugins")
    gloo_transfer.install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two folders of one model with different weights; the head is its own tensor, as vLLM's CPU kernels want it."""
    return [make_qwen3(tmp_path_factory.mktemp(f"model-{seed}"), seed, tie_word_embeddings=False) for seed in range(2)]


@pytest.fixture(scope="module")
def shared(models: list[Path], gloo_backend: None) -> Iterator[SharedEngine]:
    """An engine that was started with the first model."""
    engine = SharedEngine(lambda: make_engine("vllm", options(models[0], **TRANSFER)))
    yield engine
    engine.close()


@dataclass
class Trainer:
    """Sends weights to workers whose reports the test writes."""

    buffer: Buffer
    sender: Sender

    def announce(self, folder: Path, version: int) -> LiveModel:
        stored = self.sender.announce(load_file(folder / "model.safetensors"), version)
        return LiveModel(epoch=1, version=version, uri=stored.uri, digest=stored.digest)


def report(buffer: Buffer) -> None:
    """A worker's report counts for half a minute."""
    buffer.report_worker("w", {"transfer_ranks": 1, "state": "run"})


@pytest.fixture
def trainer(buffer: Buffer) -> Trainer:
    buffer.create_run()
    return Trainer(buffer, Sender(buffer, GlooRendezvous(), address=ADDRESS, join_s=PATIENCE_S, timeout_s=PATIENCE_S))


def version(index: int) -> WeightsVersion:
    return WeightsVersion(1, index, f"digest-{index}")


async def receive(host: EngineHost, trainer: Trainer, live: LiveModel, mode: SwapMode) -> None:
    """What a worker does when it hears of `live`."""
    number = int(live.uri.removeprefix("nccl:"))
    incoming = await BroadcastReceiver(BufferCalls(trainer.buffer), "w").enter(live, number)
    await host.receive(incoming, version(live.version), mode)


@pytest.mark.parametrize("mode", [SwapMode.WAIT, SwapMode.ABORT, SwapMode.KEEP])
def test_logprobs_match_the_weights_that_a_trainer_sent_under_load(
    shared: SharedEngine, models: list[Path], trainer: Trainer, mode: SwapMode
) -> None:
    shared.begin_at(models[0], version(0))
    host = EngineHost(lambda: shared.engine, restarts=0)
    host._engine = shared.engine  # it has been started
    requests = [Request(PROMPT, Sampling(max_tokens=900, seed=seed)) for seed in range(12)]

    async def scenario() -> list[Any]:
        running = [asyncio.create_task(host.generate(request)) for request in requests]
        await host.generate(Request(PROMPT, Sampling(max_tokens=8)))
        report(trainer.buffer)  # starting the engine took its time
        live = trainer.announce(models[1], 1)
        sending = asyncio.create_task(asyncio.to_thread(trainer.sender.send))
        await receive(host, trainer, live, mode)
        await sending
        return [*await asyncio.gather(*running), await host.generate(Request(PROMPT, Sampling(max_tokens=20)))]

    *before, after = completions = shared.run(scenario())
    assert [span.version for span in after.versions] == [1]
    versions = {span.version for completion in before for span in completion.versions}
    assert versions == ({0, 1} if mode is SwapMode.KEEP else {0})
    for completion in completions:
        ids = np.concatenate([PROMPT, completion.ids])
        start = 0
        for span in completion.versions:
            again = forward_logprobs(models[span.version], ids)[len(PROMPT) - 1 :]
            part = slice(start, start + span.tokens)
            assert np.abs(again[part] - completion.logprobs[part]).max() < TOLERANCE
            start += span.tokens


@pytest.mark.parametrize(
    ("norm", "problem"),
    [(torch.ones(3), r"has shape \(3,\)"), (torch.ones(64, dtype=torch.int8), "has dtype I8, the model's is F32")],
)
def test_weights_of_another_model_are_refused_before_the_engine_meets_anybody(
    shared: SharedEngine, models: list[Path], trainer: Trainer, norm: torch.Tensor, problem: str
) -> None:
    shared.begin_at(models[0], version(0))
    host = EngineHost(lambda: shared.engine, restarts=0)
    host._engine = shared.engine
    tensors = load_file(models[1] / "model.safetensors")
    tensors["model.norm.weight"] = norm
    stored = trainer.sender.announce(tensors, 1)
    with pytest.raises(WeightsError, match=f"weight broadcast .*'model.norm.weight' {problem}"):
        shared.run(receive(host, trainer, LiveModel(1, 1, stored.digest, stored.uri), SwapMode.KEEP))
    after = shared.run(host.generate(Request(PROMPT, Sampling(max_tokens=5))))
    assert [span.version for span in after.versions] == [0]


class MuteGroup(GlooProcessGroup):
    """Of a trainer that meets the engines and then sends nothing, while its connections stay."""

    def send(self, tensors: Any) -> None:
        raise RuntimeError("the GPU fell off the bus")

    def close(self) -> None:
        pass


class MuteMeeting(GlooRendezvous):
    def __init__(self) -> None:
        self.groups: list[GlooProcessGroup] = []  # that nobody frees, which would close their connections

    def __call__(self, address: str, port: int, world_size: int) -> GlooProcessGroup:
        self.groups.append(MuteGroup(address, port, world_size))
        return self.groups[-1]


@pytest.mark.slow  # two engines; tests/consumer/weights/test_sender.py has workers that die in a round
def test_an_engine_that_hangs_in_a_round_is_started_again_and_takes_part_in_the_next_attempt(
    models: list[Path], trainer: Trainer
) -> None:
    async def scenario() -> None:
        host = EngineHost(lambda: make_engine("vllm", options(models[0], **TRANSFER)), restarts=1)
        await host.start()
        keeping = asyncio.create_task(host.keep_alive())
        try:
            report(trainer.buffer)
            live = trainer.announce(models[1], 1)
            trainer.sender._rendezvous = mute = MuteMeeting()
            sending = asyncio.create_task(asyncio.to_thread(trainer.sender.send))
            with pytest.raises(EngineDead, match="fell off the bus"):
                await receive(host, trainer, live, SwapMode.KEEP)
            await sending
            assert len(mute.groups) == 1
            while host.version is None:
                await asyncio.sleep(0.05)
            with pytest.raises(TooLate):
                await receive(host, trainer, live, SwapMode.KEEP)
            trainer.sender._rendezvous = GlooRendezvous()
            report(trainer.buffer)
            serving = asyncio.create_task(asyncio.to_thread(trainer.sender.serve_late))
            await asyncio.to_thread(BroadcastLog(trainer.buffer, 1).wait, lambda found: found.current.open, PATIENCE_S)
            await receive(host, trainer, live, SwapMode.KEEP)
            await serving
            after = await host.generate(Request(PROMPT, Sampling(max_tokens=20)))
            again = forward_logprobs(models[1], np.concatenate([PROMPT, after.ids]))[len(PROMPT) - 1 :]
            assert np.abs(again - after.logprobs).max() < TOLERANCE
            assert [span.version for span in after.versions] == [1]
        finally:
            keeping.cancel()
            await host.close()

    asyncio.run(scenario())
