"""A worker with a real engine follows versions that are published as deltas, and comes back to older ones."""

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.weights.chain import is_chain
from rollq.consumer.settings import Transport
from rollq.consumer.weights.publisher import WeightPublisher
from rollq.consumer.weights.sources import probe_of, weights_source
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.weight_follower import WeightFollower
from support.model_families import make_model
from support.s3_server import S3Server

STEPS = 7
FULL_EVERY = 3


@pytest.mark.parametrize("transport", ["redis", "path", "s3"])
def test_an_engine_serves_every_version(
    buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Transport
) -> None:
    """The probe of each version tells whether the engine serves it."""
    buffer.create_run()
    folder = make_model(tmp_path / "model", "qwen3", 0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with S3Server(tmp_path / "s3") as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        where = server.url if transport == "s3" else tmp_path / "shared"
        publisher = WeightPublisher(buffer, transport, where, 3, full_every=FULL_EVERY)
        stored = publisher.start(weights_source(folder, probe_of(model)))
        epoch = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, uri=stored.uri, digest=stored.digest)

        def train(step: int) -> bool:
            """A large step, so that two versions differ by more than rounding; returns whether it went as a delta."""
            ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            stored = publisher.announce(weights_source(model), step)
            buffer.publish(epoch, step, uri=stored.uri, digest=stored.digest)
            return is_chain(stored.uri)

        async def follow() -> None:
            options = TransformersSettings(model=folder, device="cpu")
            host = EngineHost(lambda: TransformersEngine(options), restarts=0)
            await host.start()
            settings = WorkerSettings(weights_folder=tmp_path / "worker")
            follower = WeightFollower(BufferCalls(buffer), host, Signals(), settings, worker="w")
            try:
                with follower:
                    assert await follower.catch_up()
                    for step in range(1, STEPS + 1):
                        assert train(step) == (step % FULL_EVERY != 1)
                        assert await follower.catch_up(), follower.refused
                        assert host.ready
                        assert host.version is not None
                        assert host.version.version == step
            finally:
                await host.close()

        asyncio.run(follow())
    assert list((tmp_path / "worker").iterdir()) == [], "the worker's folder goes with it"
