"""Weights go from the trainer into worker processes, also when some of these die on the way, or come late."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.weights.broadcast_log import Broadcast, BroadcastLog
from rollq.consumer import Consumer, ConsumerSettings
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.weights.publisher import make_sender
from support.broadcast_worker import follow
from support.buffer_run import World
from support.forks import FORKS
from support.gloo_group import ADDRESS, GlooRendezvous
from support.manual_worker import make_run
from support.waiting import PATIENCE_S, wait_until

Start = Callable[..., BaseProcess]


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"embed": torch.full((2, 3), value), "norm": torch.arange(5.0).to(torch.bfloat16) + value}


@pytest.fixture
def buffer(buffer: Buffer) -> Buffer:
    make_run(buffer)
    return buffer


@pytest.fixture
def start(server_url: str, buffer: Buffer, tmp_path: Path) -> Iterator[Start]:
    """Start worker processes."""
    with ExitStack() as ends:

        def start_one(name: str, behaviour: str = "") -> BaseProcess:
            process = FORKS.Process(target=follow, args=(server_url, buffer.run, name, behaviour, tmp_path))
            process.start()
            ends.callback(process.join)
            ends.callback(process.kill)
            return process

        yield start_one


@pytest.fixture
def connect(
    server_url: str, buffer: Buffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Consumer]:
    """A trainer that has taken the batch of step 1; its first weights were those of `tensors(0)`, in a folder."""
    monkeypatch.setattr("rollq.consumer.weights.publisher.NcclRendezvous", GlooRendezvous)
    (tmp_path / "initial").mkdir()
    save_file(tensors(0), tmp_path / "initial" / "model.safetensors")

    def open_consumer(join_s: float = PATIENCE_S, timeout_s: float = PATIENCE_S) -> Consumer:
        settings = ConsumerSettings.model_validate(
            {"transport": "nccl", "nccl": {"address": ADDRESS, "join_s": join_s, "timeout_s": timeout_s}}
        )
        consumer = Consumer.connect(server_url, run=buffer.run, weights=tmp_path / "initial", settings=settings)
        World(buffer).complete(2)
        return consumer

    return open_consumer


def until_served(buffer: Buffer, *wanted: str) -> None:
    """Until each of these "<worker> <version>" has happened once more."""
    left = list(wanted)

    def all_served() -> bool:
        served: Any = buffer.client.lpop(f"{buffer.run}:served")
        if served is not None:
            left.remove(served.decode())
        return not left

    wait_until(all_served, otherwise=lambda: f"never served: {left}")
    names = {served.split()[0] for served in wanted}
    with buffer.events() as events:
        while not names <= buffer.workers().keys():  # the trainer counts on those who have reported
            events.wait(1)


def check(folder: Path, served: str, value: float, how: str) -> None:
    """A worker has exactly what was sent, by that way."""
    with safe_open(folder / f"{served.replace(' ', '-')}.safetensors", framework="pt") as file:
        assert file.metadata() == {"how": how}
        assert set(file.keys()) == tensors(value).keys()
        for name, tensor in tensors(value).items():
            assert file.get_tensor(name).dtype == tensor.dtype
            assert file.get_tensor(name).equal(tensor)


def the_round(buffer: Buffer, number: int = 1) -> Broadcast:
    return BroadcastLog(buffer, number).read()


@pytest.fixture
def while_waiting(buffer: Buffer) -> Callable[[Consumer], Any]:
    """A context in which the trainer waits for the batch of step 2, which then comes."""

    class Waiting:
        def __init__(self, consumer: Consumer) -> None:
            self._batches: list[Any] = []
            self._thread = threading.Thread(target=lambda: self._batches.append(next(consumer)))

        def __enter__(self) -> None:
            self._thread.start()

        def __exit__(self, *error: object) -> None:
            World(buffer).complete(2)
            self._thread.join()
            assert [batch.step for batch in self._batches] == [2]

    return Waiting


def test_all_workers_take_the_weights_from_the_trainer(
    connect: Callable[..., Consumer], buffer: Buffer, start: Start, tmp_path: Path
) -> None:
    with connect() as consumer:
        start("a")
        start("b")
        until_served(buffer, "a 0", "b 0")
        check(tmp_path, "a 0", 0, "file")
        batch = next(consumer)
        consumer.publish(tensors(1), step=1)
        check(tmp_path, "a 1", 1, "round")
        check(tmp_path, "b 1", 1, "round")
        assert the_round(buffer).took == {"a", "b"}
        consumer.publish(tensors(1), step=1)
        live = buffer.live_model()
        assert live is not None
        assert live.uri == "nccl:1", "the same version has one round"
        assert len(the_round(buffer).attempts) == 1, "and nobody is asked again"
        consumer.commit(batch)


@pytest.mark.parametrize("waits_for", ["a batch", "an evaluation"])
def test_who_was_not_there_gets_the_weights_while_the_trainer_waits(
    connect: Callable[..., Consumer],
    buffer: Buffer,
    start: Start,
    tmp_path: Path,
    waits_for: str,
    while_waiting: Callable[[Consumer], Any],
) -> None:
    buffer.register_task("aime", TaskRules.model_validate({"kind": "eval", "batch_groups": 1}))
    with connect(join_s=8) as consumer:
        start("a")
        start("dead", "dies before it is ready")
        until_served(buffer, "a 0", "dead 0")
        batch = next(consumer)
        weights = tensors(1)
        consumer.publish(weights, step=1)
        for tensor in weights.values():
            tensor.zero_()  # the next step's update
        consumer.commit(batch)
        assert the_round(buffer).took == {"a"}
        start("late")
        if waits_for == "a batch":
            with while_waiting(consumer):
                until_served(buffer, "a 1", "late 1")
        else:
            evaluating = threading.Thread(target=consumer.evaluate)
            evaluating.start()
            until_served(buffer, "a 1", "late 1")
            consumer._stop.set()
            evaluating.join()
        check(tmp_path, "a 1", 1, "round")
        check(tmp_path, "late 1", 1, "round")


@pytest.mark.parametrize("behaviour", ["dies as a member", "dies while it receives"])
def test_a_member_that_dies_ends_the_attempt_in_time_and_the_others_take_part_in_the_next(
    connect: Callable[..., Consumer],
    buffer: Buffer,
    start: Start,
    tmp_path: Path,
    behaviour: str,
    while_waiting: Callable[[Consumer], Any],
) -> None:
    with connect(timeout_s=8) as consumer:
        start("a")
        start("dead", behaviour)
        until_served(buffer, "a 0", "dead 0")
        batch = next(consumer)
        consumer.publish(tensors(1), step=1)
        consumer.commit(batch)
        first = the_round(buffer).attempts[0]
        assert set(first.members or ()) == {"a", "dead"}
        assert first.over
        with while_waiting(consumer):
            until_served(buffer, "a 1")
        check(tmp_path, "a 1", 1, "round")
        assert the_round(buffer).took == {"a"}


def test_weights_that_do_not_fit_are_refused_and_nobody_waits_for_that_worker(
    connect: Callable[..., Consumer], buffer: Buffer, start: Start, tmp_path: Path
) -> None:
    with connect() as consumer:
        start("a")
        start("other", "has another model")
        until_served(buffer, "a 0", "other 0")
        next(consumer)
        consumer.publish(tensors(1), step=1)
        until_served(buffer, "a 1")
        found = the_round(buffer)
        assert found.attempts[0].broken == {"other": "they lack 'bias'"}
        assert (found.attempts[0].over, found.took, found.late) == ("", {"a"}, set())


def test_a_folder_is_announced_as_ever(
    connect: Callable[..., Consumer], buffer: Buffer, start: Start, tmp_path: Path
) -> None:
    with connect() as consumer:
        start("a")
        until_served(buffer, "a 0")
        batch = next(consumer)
        consumer.publish(tmp_path / "initial", step=1)
        consumer.commit(batch)
        until_served(buffer, "a 1")
        check(tmp_path, "a 1", 0, "file")


def test_nccl_needs_vllm_gpus_and_engines_that_are_awake(buffer: Buffer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs vLLM.*rollq\[vllm\]|this trainer has none"):
        make_sender(buffer, ConsumerSettings(transport="nccl"))
    assert make_sender(buffer, ConsumerSettings(transport="nccl", rank=1, world_size=2, launch_id="x")) is None
    assert make_sender(buffer, ConsumerSettings(transport="path")) is None
    with pytest.raises(ValueError, match="engines that sleep cannot take weights"):
        ConsumerSettings(transport="nccl", colocated=True)
    trainer: Mapping[str, Any] = {"model": tmp_path, "output": tmp_path, "steps": 1, "transport": "nccl"}
    with pytest.raises(ValueError, match="set device = 'cuda', not 'cpu'"):
        TrainerSettings.model_validate(trainer)
    with pytest.raises(ValueError, match="engines that sleep cannot take weights"):
        TrainerSettings.model_validate({**trainer, "device": "cuda", "colocated": True})
