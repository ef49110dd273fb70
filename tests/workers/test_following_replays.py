"""A worker keeps weights that a restarted trainer is about to publish again."""

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import sha256

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.errors import WeightsError
from rollq.buffer.rules.settings import TaskRules
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.weight_follower import WeightFollower


class Trainer:
    """Publishes weights that are named by a text; the simulated engine reads none."""

    def __init__(self, buffer: Buffer) -> None:
        buffer.create_run()
        self._buffer = buffer
        self._launches = 0
        self._held: TrainerEpoch

    def begin(self, from_step: int, weights: str = "same") -> None:
        self._launches += 1
        self._held = self._buffer.begin_epoch(
            trainer_id="t", launch_id=f"launch-{self._launches}", from_step=from_step, uri="",
            digest=digest_of(from_step, weights), takeover=True, accept_new_store=True,
        )  # fmt: skip

    def publish(self, version: int, weights: str = "same", uri: str = "") -> None:
        self._buffer.publish(self._held, version, uri=uri, digest=digest_of(version, weights))


def digest_of(version: int, weights: str) -> str:
    return sha256(f"{weights} {version}".encode()).hexdigest()


@pytest.fixture
def trainer(buffer: Buffer) -> Trainer:
    return Trainer(buffer)


def follow(buffer: Buffer, scenario: Callable[[Callable[[], Awaitable[tuple[int, int]]]], Awaitable[None]]) -> None:
    """Run `scenario` with a function that follows the live weights, and returns the epoch and version then served."""

    async def run() -> None:
        host = EngineHost(lambda: SimulatedEngine(SimulatedSettings()), restarts=0)
        await host.start()
        calls, tasks = BufferCalls(buffer), sorted(buffer.tasks())
        follower = WeightFollower(calls, host, Signals(), WorkerSettings(), worker="w", tasks=tasks)

        async def served() -> tuple[int, int]:
            if not await follower.catch_up():
                raise WeightsError(follower.refused)
            assert host.version is not None
            return host.version.epoch, host.version.version

        try:
            with follower:
                await scenario(served)
        finally:
            await host.close()

    asyncio.run(run())


def test_weights_that_a_replay_publishes_again_stay_until_it_does(buffer: Buffer, trainer: Trainer) -> None:
    async def scenario(served: Callable[[], Awaitable[tuple[int, int]]]) -> None:
        trainer.begin(0)
        trainer.publish(1)
        trainer.publish(2)
        assert await served() == (1, 2)
        trainer.begin(0)
        assert await served() == (1, 2)
        trainer.publish(1)
        assert await served() == (1, 2)
        trainer.publish(2)
        assert await served() == (2, 2)
        trainer.publish(3)
        assert await served() == (2, 3)

    follow(buffer, scenario)


def test_they_go_while_an_evaluation_of_the_weights_before_them_is_open(buffer: Buffer, trainer: Trainer) -> None:
    buffer.register_task("held_out", TaskRules(kind="eval", batch_groups=1, group_size=1))

    async def scenario(served: Callable[[], Awaitable[tuple[int, int]]]) -> None:
        trainer.begin(0)
        trainer.publish(1)
        trainer.publish(2)
        assert await served() == (1, 2)
        trainer.begin(0)
        trainer.publish(1)
        assert await served() == (1, 2)
        buffer.open_batch("held_out", "1/held_out", "eval", step=1)
        assert await served() == (2, 1)  # the trainer publishes nothing until the evaluation has ended

    follow(buffer, scenario)


def test_they_go_as_soon_as_the_replay_publishes_others(buffer: Buffer, trainer: Trainer) -> None:
    async def scenario(served: Callable[[], Awaitable[tuple[int, int]]]) -> None:
        trainer.begin(0)
        trainer.publish(1)
        trainer.publish(2)
        assert await served() == (1, 2)
        trainer.begin(0)
        trainer.publish(1, "other")
        assert await served() == (2, 1)

    follow(buffer, scenario)


def test_a_broadcast_is_joined(buffer: Buffer, trainer: Trainer) -> None:
    """The trainer waits for all engines that can take part."""

    async def scenario(served: Callable[[], Awaitable[tuple[int, int]]]) -> None:
        trainer.begin(0)
        trainer.publish(1)
        trainer.publish(2)
        assert await served() == (1, 2)
        trainer.begin(0)
        trainer.publish(1, uri="nccl:1")
        with pytest.raises(WeightsError, match="broadcast"):
            await served()

    follow(buffer, scenario)
