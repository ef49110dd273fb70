"""A worker in a weight broadcast: every wait ends, and no engine hangs in an incomplete process group."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.weights.broadcast_log import BroadcastLog, TensorSpec
from rollq.buffer.weights.manifest import Tensor
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.engines import receiver as rounds
from rollq.workers.engines.host import EngineHost
from rollq.workers.engines.protocol import EngineDead, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import BroadcastReceiver, Incoming, TooLate, TransferPlan
from rollq.workers.engines.vllm.extension import LoadExtension
from rollq.workers.settings import WorkerSettings
from rollq.workers.wake_signals import Signals
from rollq.workers.weight_follower import WeightFollower
from support.worker_run import Script, ScriptedEngine

MEETING = {"master_address": "10.0.0.1", "master_port": 1234, "world_size": 4}
MEMBER = {"members": {"other": 1, "w": 3}, "meeting": MEETING, "attempt": 1}
VERSION = WeightsVersion(1, 1, "digest")


class ReceivingEngine(ScriptedEngine):
    """Takes weights as its `receive` function says, which is given what it was asked to take."""

    transfer_ranks = 2
    taking: Callable[[TransferPlan], Awaitable[float]]

    async def receive(self, incoming: Incoming, version: WeightsVersion, mode: SwapMode) -> float:
        if incoming.tensors != {"embed": Tensor("BF16", (2, 3)), "bias": Tensor("F32", ())}:
            raise WeightsError("they belong to another model")
        swap_pause_s = await self.taking(await incoming.join(self.transfer_ranks))
        self.version = version
        return swap_pause_s


class Broadcast:
    """The one round of a run, and a worker `w` in it."""

    def __init__(self, buffer: Buffer, tensors: tuple[TensorSpec, ...], *, join_s: float, timeout_s: float) -> None:
        self.log, stored = BroadcastLog.open(buffer, tensors, join_s=join_s, timeout_s=timeout_s)
        self.live = LiveModel(1, 1, stored.digest, stored.uri)
        self.calls = BufferCalls(buffer)
        self.rounds = BroadcastReceiver(self.calls, "w")

    async def enter(self) -> Incoming:
        return await self.rounds.enter(self.live, 1)

    def read(self) -> Any:
        return BroadcastLog(self.calls.buffer, 1).read()


TENSORS = (TensorSpec("embed", "bfloat16", (2, 3)), TensorSpec("bias", "float32", ()))


@pytest.fixture
def begin(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Broadcast]:
    monkeypatch.setattr(rounds, "SLACK_S", 0.0)
    buffer.create_run()

    def open_round(*tensors: TensorSpec, join_s: float = 60.0, timeout_s: float = 60.0) -> Broadcast:
        return Broadcast(buffer, tensors or TENSORS, join_s=join_s, timeout_s=timeout_s)

    return open_round


async def hosted(taking: Callable[[TransferPlan], Awaitable[float]]) -> EngineHost:
    engine = ReceivingEngine(Script())
    engine.taking = taking
    host = EngineHost(lambda: engine, restarts=0)
    await host.start()
    return host


async def forever(plan: TransferPlan) -> float:
    await asyncio.Event().wait()
    return 0.0


def test_a_named_member_takes_what_the_trainer_says_with_its_own_rank(begin: Callable[..., Broadcast]) -> None:
    found = begin()
    plans: list[TransferPlan] = []

    async def take(plan: TransferPlan) -> float:
        plans.append(plan)
        return 1.5

    async def scenario() -> float | None:
        host = await hosted(take)
        receiving = asyncio.create_task(host.receive(await found.enter(), VERSION, SwapMode.KEEP))
        await found.calls(BroadcastLog(found.calls.buffer, 1).wait, lambda one: bool(one.current.ready), 60)
        await found.calls(found.log.append, MEMBER)
        swap_pause_s = await receiving
        assert host.published.is_set()
        assert host.version == VERSION
        return swap_pause_s

    assert asyncio.run(scenario()) == 1.5
    assert plans == [
        TransferPlan(
            {**MEETING, "rank_offset": 3},
            {"names": ["embed", "bias"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]},
        )
    ]
    assert (found.read().current.ready, found.read().took) == ({"w": 2}, {"w"})


@pytest.mark.parametrize(
    "said",
    [
        {"members": {"other": 1}, "meeting": MEETING, "attempt": 1},  # without this one
        {"over": "nobody else came", "attempt": 1},
        None,  # the trainer died
    ],
)
def test_who_is_not_named_goes_on_with_the_old_weights_and_asks_to_be_served_later(
    begin: Callable[..., Broadcast], said: dict[str, Any] | None
) -> None:
    found = begin(join_s=60.0 if said else 0.01)

    async def scenario() -> None:
        host = await hosted(forever)
        receiving = asyncio.create_task(host.receive(await found.enter(), VERSION, SwapMode.KEEP))
        await found.calls(BroadcastLog(found.calls.buffer, 1).wait, lambda one: bool(one.current.ready), 60)
        if said:
            await found.calls(found.log.append, said)
        with pytest.raises(TooLate):
            await receiving
        assert host.version is not None, "the engine lives"
        with pytest.raises(TooLate):  # once per attempt is enough: it would pause again and again
            await found.enter()
        assert found.read().late == {"w"}
        await found.calls(found.log.append, {"over": "", "attempt": 1})
        await found.calls(found.log.append, {"opened": True, "attempt": 2})
        assert await found.enter() is not None

    asyncio.run(scenario())


@pytest.mark.parametrize(("over", "reason"), [("the GPU fell off", "the GPU fell off"), ("", "it did not end within")])
def test_an_engine_that_hangs_in_a_group_is_dead_as_soon_as_that_is_known(
    begin: Callable[..., Broadcast], over: str, reason: str
) -> None:
    found = begin(timeout_s=60.0 if over else 0.01)

    async def scenario() -> None:
        meeting = asyncio.Event()

        async def hang(plan: TransferPlan) -> float:
            meeting.set()
            return await forever(plan)

        host = await hosted(hang)
        receiving = asyncio.create_task(host.receive(await found.enter(), VERSION, SwapMode.KEEP))
        await found.calls(BroadcastLog(found.calls.buffer, 1).wait, lambda one: bool(one.current.ready), 60)
        await found.calls(found.log.append, MEMBER)
        await meeting.wait()
        if over:
            await found.calls(found.log.append, {"over": over, "attempt": 1})
        with pytest.raises(EngineDead, match=f"hangs in weight broadcast 1: {reason}"):
            await receiving
        assert host.version is None
        assert not host.published.is_set()

    asyncio.run(scenario())
    assert reason in found.read().current.broken["w"]


def test_a_round_that_is_not_the_announced_one_is_refused(begin: Callable[..., Broadcast]) -> None:
    found = begin()
    found.live = LiveModel(1, 1, "another", found.live.uri)
    with pytest.raises(WeightsError, match="not the one that was announced"):
        asyncio.run(found.enter())


def test_weights_that_do_not_fit_are_not_asked_for_again(
    begin: Callable[..., Broadcast], buffer: Buffer, tmp_path: Path
) -> None:
    found = begin(TensorSpec("embed", "float32", (9,)))
    held = buffer.begin_epoch(trainer_id="t", launch_id="l", from_step=0, mode="replay", uri="", digest="")
    buffer.publish(held, 1, uri=found.live.uri, digest=found.live.digest)

    async def scenario() -> None:
        host = await hosted(forever)
        settings = WorkerSettings(weights_folder=tmp_path)
        with WeightFollower(found.calls, host, Signals(), settings, worker="w") as follower:
            assert not await follower.catch_up()
            assert not await follower.catch_up()

    asyncio.run(scenario())
    assert found.read().current.broken == {"w": "they belong to another model"}
    assert found.read().late == set()


def test_a_group_that_vllm_could_not_make_is_left_before_weights_are_touched() -> None:
    """Without NCCL's library vLLM's group does nothing, silently; only a machine with GPUs gets so far in earnest."""
    calls: list[str] = []

    class TransferEngine:
        model_update_group: Any = SimpleNamespace(disabled=True)

        def shutdown(self) -> None:
            calls.append("left")

    class VllmWorker(LoadExtension):
        weight_transfer_engine = TransferEngine()

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            calls.append("met")

        def start_weight_update(self) -> None:
            calls.append("touched")

    with pytest.raises(RuntimeError, match="no NCCL library"):
        VllmWorker().rollq_receive({}, {})
    assert calls == ["met", "left"]


def test_an_engine_that_takes_files_only_says_what_to_set(begin: Callable[..., Broadcast]) -> None:
    found = begin()

    async def scenario() -> None:
        host = EngineHost(lambda: ScriptedEngine(Script()), restarts=0)
        await host.start()
        assert host.transfer_ranks == 0
        with pytest.raises(ConfigError, match=r"weight_transfer_config.*or \[trainer\] transport = 'path'"):
            await host.receive(await found.enter(), VERSION, SwapMode.KEEP)

    asyncio.run(scenario())
