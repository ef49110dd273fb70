"""A worker whose engine serves published weights wrongly goes back to those before, and says why."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.weights.probe import Probe
from rollq.buffer.weights.store import StoredWeights, locate_weights, read_files, store_weights
from rollq.consumer.weights.sources import probe_of
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.openai.engine import OpenAIEngine, OpenAISettings
from rollq.workers.engines.protocol import Engine, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import BroadcastReceiver
from rollq.workers.engines.transformers.engine import TransformersEngine, TransformersSettings
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.weight_follower import WeightFollower
from support.model_families import make_model
from support.openai_server import CompletionsServer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_model(tmp_path_factory.mktemp(f"model-{seed}"), "qwen3", seed) for seed in range(3)]


class Run:
    """A trainer that publishes weights with the probe of any model, and the follower of one worker."""

    def __init__(self, buffer: Buffer, models: list[Path], *, through_redis: bool) -> None:
        self._buffer = buffer
        self._models = models
        self._through_redis = through_redis
        self._epoch: TrainerEpoch | None = None

    def publish(self, version: int, *, probe_of_model: int) -> None:
        """Publish weights `version` of the models, with another model's probe if that is another number."""
        probe = probe_of(AutoModelForCausalLM.from_pretrained(self._models[probe_of_model], dtype=torch.float32))
        stored = self._store(self._models[version], probe)
        if self._epoch is None:
            self._epoch = self._buffer.begin_epoch(
                trainer_id="t", launch_id="l", from_step=version, uri=stored.uri, digest=stored.digest
            )
        else:
            self._buffer.publish(self._epoch, version, uri=stored.uri, digest=stored.digest)

    def announce_broadcast(self, version: int) -> None:
        """Publish weights that go straight into engines."""
        assert self._epoch is not None
        self._buffer.publish(self._epoch, version, uri="nccl:1", digest="of-the-broadcast")

    def lose_live_weights(self) -> None:
        """Their manifest goes."""
        live = self._buffer.live_model()
        assert live is not None
        self._buffer.client.delete(self._buffer.keys.weights(live.digest, 0))

    def _store(self, folder: Path, probe: Probe) -> StoredWeights:
        if self._through_redis:
            return store_weights(self._buffer, read_files(folder), probe=probe)
        return locate_weights(self._buffer, folder, probe=probe)

    def follow(
        self, scenario: Callable[[WeightFollower, EngineHost], Any], make: Callable[[], Engine] | None = None
    ) -> None:
        """Run `scenario` with the worker's follower and the host of its engine."""

        async def run() -> None:
            options = TransformersSettings(model=self._models[0], device="cpu")
            host = EngineHost(make or (lambda: TransformersEngine(options)), restarts=0)
            await host.start()
            follower = WeightFollower(BufferCalls(self._buffer), host, Signals(), WorkerSettings(), worker="w")
            try:
                with follower:
                    await scenario(follower, host)
            finally:
                await host.close()

        asyncio.run(run())


@pytest.fixture(params=[True, False], ids=["redis", "path"])
def run(buffer: Buffer, models: list[Path], request: pytest.FixtureRequest) -> Run:
    buffer.create_run()
    return Run(buffer, models, through_redis=request.param)


def served(host: EngineHost) -> tuple[int | None, bool]:
    """The version that is served, and whether groups may be leased."""
    return (None if host.version is None else host.version.version), host.ready


def test_a_worker_goes_back_to_the_weights_before_and_on_to_the_next(run: Run) -> None:
    async def scenario(follower: WeightFollower, host: EngineHost) -> None:
        run.publish(0, probe_of_model=0)
        assert await follower.catch_up()
        assert served(host) == (0, True)
        run.publish(1, probe_of_model=2)
        assert not await follower.catch_up()
        assert served(host) == (0, True)
        assert follower.refused is not None
        assert follower.refused.startswith("weights of version 1 refused, the engine serves the old ones")
        swaps = follower.swaps
        assert not await follower.catch_up()
        assert follower.swaps == swaps  # not loaded again
        run.publish(2, probe_of_model=2)
        assert await follower.catch_up()
        assert served(host) == (2, True)
        assert follower.refused is None

    run.follow(scenario)


def test_servers_that_others_load_late_are_waited_for(run: Run) -> None:
    """The server gives all tokens the same logprob, and so does no model: its version is known to be wrong."""

    async def scenario(follower: WeightFollower, host: EngineHost) -> None:
        run.publish(0, probe_of_model=0)
        for _ in range(2):
            assert not await follower.catch_up()
            assert not host.ready
        assert follower.refused is not None
        assert follower.refused.startswith("weights of version 0 refused, there are no others: no server serves")
        server.prompt_logprob = None  # it says nothing any more, and is trusted
        assert await follower.catch_up()
        assert served(host) == (0, True)
        assert follower.refused is None

    with CompletionsServer() as server:
        settings = OpenAISettings(urls=(server.url,), server_follows=True)
        run.follow(scenario, lambda: OpenAIEngine(settings))


def test_without_weights_before_nothing_is_leased(run: Run) -> None:
    async def scenario(follower: WeightFollower, host: EngineHost) -> None:
        run.publish(0, probe_of_model=1)
        assert not await follower.catch_up()
        assert not host.ready
        assert follower.refused is not None
        assert follower.refused.startswith("weights of version 0 refused, there are no others")
        assert not await follower.catch_up()
        assert not host.ready

    run.follow(scenario)


def test_a_worker_that_falls_asleep_on_its_way_back_goes_back_when_it_wakes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(follower: WeightFollower, host: EngineHost) -> None:
        run.publish(0, probe_of_model=0)
        assert await follower.catch_up()
        run.publish(1, probe_of_model=2)
        swap, sleeping = host.swap, []

        async def swap_before_sleep(*args: Any) -> float | None:
            sleeping.append(asyncio.create_task(host.sleep()))
            return await swap(*args)

        with monkeypatch.context() as patched:
            patched.setattr(host, "swap", swap_before_sleep)
            assert not await follower.catch_up()
        await asyncio.gather(*sleeping)
        assert served(host) == (1, False)
        await host.wake()
        assert not await follower.catch_up()
        assert served(host) == (0, True)

    run.follow(scenario)


def test_a_new_engine_gets_the_weights_before_a_rejected_broadcast(
    run: Run, models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(follower: WeightFollower, host: EngineHost) -> None:
        async def enter(*_: Any) -> None: ...

        async def receive(_: None, version: WeightsVersion, mode: SwapMode) -> float | None:
            probe = probe_of(AutoModelForCausalLM.from_pretrained(models[2], dtype=torch.float32))
            return await host.swap(models[1], version, mode, probe)

        monkeypatch.setattr(BroadcastReceiver, "enter", enter)
        monkeypatch.setattr(host, "receive", receive)
        run.publish(0, probe_of_model=0)
        assert await follower.catch_up()
        run.announce_broadcast(1)
        assert not await follower.catch_up()
        assert served(host) == (0, True)
        await host.close()
        await host.start()
        assert not await follower.catch_up()
        assert served(host) == (0, True)

    run.follow(scenario)


def test_a_new_engine_serves_the_weights_before_those_that_cannot_be_read(run: Run) -> None:
    async def scenario(follower: WeightFollower, host: EngineHost) -> None:
        run.publish(0, probe_of_model=0)
        assert await follower.catch_up()
        run.publish(1, probe_of_model=1)
        run.lose_live_weights()
        assert not await follower.catch_up()
        assert served(host) == (0, True)
        await host.close()
        await host.start()
        assert not await follower.catch_up()
        assert served(host) == (0, True)

    run.follow(scenario)
