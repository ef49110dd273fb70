"""The reference trainer on batches that fill while it trains: the rule, and what a killed rank leaves."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import CorruptGroup, ProductionStalled, ProductionStopped, ServerError, SyncFirst
from rollq.buffer.store.connection import Patience
from rollq.consumer import Batch, BatchStream
from rollq.consumer.settings import TrainerSettings
from rollq.consumer.trainer.checkpoints import OPTIMIZER_FILE, newest_checkpoint
from rollq.consumer.trainer.ranks import Ranks
from rollq.consumer.trainer.taking import LEAST_S, BatchTaker, StepTimes, is_worth_streaming, may_stream
from support.consumer_groups import random_groups
from support.manual_worker import StepwiseWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.trainer_rank import Kill, metrics, run_ranks, short_training

GROUPS, STEPS = 4, 2


@pytest.mark.parametrize(
    ("fill_s", "train_s", "expected"),
    [(10, 10, True), (10, 2, True), (10, 1, False), (2, 30, False), (0.5, 0.5, False), (0, 10, False), (1, 1, True)],
)
def test_a_step_is_streamed_where_both_filling_and_training_take_long(
    fill_s: float, train_s: float, expected: bool
) -> None:
    assert is_worth_streaming([StepTimes(fill_s, train_s)] * 3) is expected


def test_the_last_five_steps_decide_together_and_nothing_before_the_first() -> None:
    assert not is_worth_streaming([])
    slow, fast = StepTimes(10 * LEAST_S, 10 * LEAST_S), StepTimes(0, 0)
    assert is_worth_streaming([fast] * 9 + [slow] * 5)
    assert not is_worth_streaming([slow] * 9 + [fast] * 5)


@pytest.mark.parametrize(
    "needs_whole",
    [
        {"updates_per_batch": 2},
        {"advantages": {"baseline": "batch", "scale": "batch"}},
        {"loss": {"sft": {"math": 1.0}}},
        {"colocated": True},
    ],
    ids=str,
)
def test_a_trainer_that_needs_whole_batches_takes_them(tmp_path: Path, needs_whole: dict[str, object]) -> None:
    assert may_stream(short_training(tmp_path, tmp_path))
    assert not may_stream(short_training(tmp_path, tmp_path, **needs_whole))


class AddedUp:
    """A learner that counts what it is asked for."""

    def __init__(self) -> None:
        self.begun = self.added = 0
        self.model = tiny_qwen3(1)

    def begin(self) -> None:
        self.begun += 1

    def parts(self, batch: Any) -> list[Any]:
        return [(batch, None)]

    def gradients(self, *args: Any) -> bool:
        self.added += 1
        return True


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (CorruptGroup("math", 1, "broken"), "again"),
        (SyncFirst("publish first"), "publish"),
        (ProductionStalled("full"), "checkpoint"),
        (ProductionStopped("too many failures"), "end"),
        (StopIteration(), "stop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_interrupts_a_batch_that_fills_is_done_first_and_the_batch_taken_anew(
    tmp_path: Path, error: Exception, word: str
) -> None:
    batch = Batch.build(1, random_groups(1))

    def parts() -> Iterator[tuple[Batch, Batch | None]]:
        yield batch, None
        if not isinstance(error, StopIteration):
            raise error

    learner = AddedUp()
    taker = BatchTaker(
        SimpleNamespace(step=1, replayed_through=1),
        learner,  # type: ignore[arg-type]
        short_training(tmp_path, tmp_path),
        Ranks(),
        threading.Event(),
        stream=lambda *args, **options: BatchStream(parts(), "token", lambda part: []),
        has_unsaved=lambda: True,
    )
    assert taker.take() == word
    assert (learner.begun, learner.added) == (1, 1)
    assert taker.take() == word
    assert (learner.begun, learner.added) == (2, 2), "the gradients so far were dropped"


@contextmanager
def feeding(url: str, run: str, folder: Path) -> Iterator[None]:
    """A run whose worker finishes a group only when the one before it is in a part of the batch: each makes a part.
    From the last to the first, so that groups are in another order than in a whole batch."""
    stop = threading.Event()

    def work() -> None:
        with suppress(ServerError), Buffer.connect(url, run, patience=Patience(closed=stop)) as buffer:
            worker = StepwiseWorker(buffer, tiny_qwen3(1), folder)
            for step in range(1, STEPS + 1):
                if not wait(lambda step=step: buffer.clock("math").version == step - 1):  # type: ignore[misc]
                    return
                for number, lease in enumerate(reversed(worker.begin(GROUPS)), start=1):
                    worker.finish([lease])
                    if not wait(partial(is_divided, buffer, step, number)):
                        return

    def is_divided(buffer: Buffer, step: int, parts: int) -> bool:
        found = buffer.send("HGET", buffer.keys.plan(step), "parts") or b""
        return len(found.splitlines()) >= parts or buffer.clock("math").committed >= step

    def wait(check: Callable[[], bool]) -> bool:
        while not check():
            if stop.wait(0.02):
                return False
        return True

    with Buffer.connect(url, run) as buffer:
        make_run(buffer, batch_groups=GROUPS, max_staleness=0, min_valid_samples=3)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def trained(settings: TrainerSettings) -> list[bytes]:
    checkpoint = newest_checkpoint(settings.output)
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    return [(checkpoint.folder / name).read_bytes() for name in ("model.safetensors", OPTIMIZER_FILE)]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_that_is_killed_while_a_batch_fills_trains_as_one_that_was_not(
    server_url: str, run_name: str, model_folder: Path, tmp_path: Path, ranks: int
) -> None:
    """Its parts are the same, with those of after the restart; no bit of the weights differs."""
    options = {"steps": STEPS, "checkpoint_every": STEPS, "learning_rate": 3e-3, "micro_batch_tokens": 18 // ranks}
    undisturbed = short_training(model_folder, tmp_path / "undisturbed", **options)
    with feeding(server_url, f"{run_name}u", tmp_path / "u"):
        assert run_ranks(ranks, server_url, f"{run_name}u", undisturbed, streamed=True) == [0] * ranks
    for line in metrics(undisturbed):
        assert line["streamed_parts"] == GROUPS
        assert line["groups"] == GROUPS
        assert 0 <= line["idle"] <= 1
    killed = short_training(model_folder, tmp_path / "killed", **options)
    with feeding(server_url, run_name, tmp_path / "k"):
        kill = Kill(ranks - 1, "before gradients", 3)
        codes = run_ranks(ranks, server_url, run_name, killed, kill, streamed=True)
        assert codes[kill.rank] == -9, codes
        assert run_ranks(ranks, server_url, run_name, killed, streamed=True) == [0] * ranks
    assert [(line["streamed_parts"], line["loss"]) for line in metrics(killed)] == [
        (line["streamed_parts"], line["loss"]) for line in metrics(undisturbed)
    ]
    assert trained(killed) == trained(undisturbed)
