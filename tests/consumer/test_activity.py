"""The trainer's activity: its own words, and how monitors read them."""

import threading
from pathlib import Path

import pytest

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.errors import ClaimTimeout
from rollq.buffer.values.trainer_state import TrainerPhase, TrainerState
from rollq.consumer.claims import trainer_lease
from rollq.consumer.claims.activity import Activity
from rollq.consumer.consumer import Consumer
from rollq.consumer.settings import ConsumerSettings
from support.buffer_run import World
from support.manual_worker import HandWorker, make_run
from support.tiny_qwen3 import tiny_qwen3
from support.waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_wait_names_what_it_lacks_and_how_long_it_lasts(clock: Clock) -> None:
    activity = Activity(7, clock)
    assert activity.words()["phase"] == "starting"
    activity.wait(7)
    activity.lack(Shortfall(7, {"math": 3}, {"math": 16}, {"math": 2}, {"math": 48}))
    clock.now_s += 5
    words = activity.words()
    assert (words["phase"], words["step"], words["for_s"]) == ("waiting", 7, 5.0)
    assert (words["ready"], words["wanted"], words["stragglers"]) == ({"math": 3}, {"math": 16}, {"math": 2})
    assert words["unarchived"] == {"math": 48}


def test_a_new_wait_lacks_nothing_of_the_last_one(clock: Clock) -> None:
    activity = Activity(7, clock)
    activity.lack(Shortfall(7, {"math": 3}, {"math": 16}))
    activity.wait(8)
    assert activity.words()["wanted"] == {}


def test_the_times_of_a_step_are_averages(clock: Clock) -> None:
    activity = Activity(1, clock)
    for step, waited_s, busy_s in ((1, 4, 1), (2, 2, 3)):
        activity.wait(step)
        clock.now_s += waited_s
        activity.train(step)
        clock.now_s += busy_s
        activity.commit(step, {"math": 0.5}, {"math": 12.0})
    assert activity.words()["waited_s"] == 3
    assert activity.words()["busy_s"] == 1  # the second step may not be over
    activity.wait(3)
    assert activity.words()["busy_s"] == 2


def test_the_usual_wait_is_the_median_and_the_last_step_ages(clock: Clock) -> None:
    activity = Activity(1, clock)
    assert not activity.words().keys() & {"usual_wait_s", "last_step_s"}
    for step, waited_s in enumerate((2, 600, 1, 900, 3), start=1):
        activity.wait(step)
        clock.now_s += waited_s
        activity.train(step)
        activity.commit(step, {"math": 0.5}, {"math": 12.0})
    clock.now_s += 7
    assert (activity.words()["usual_wait_s"], activity.words()["last_step_s"]) == (3, 7)
    assert (activity.words()["rewards"], activity.words()["response_tokens"]) == ({"math": 0.5}, {"math": 12.0})


def test_a_phase_within_another_one_ends_there(clock: Clock) -> None:
    activity = Activity(1, clock)
    activity.train(1)
    clock.now_s += 2
    with activity.during(TrainerPhase.SAVING):
        assert activity.words()["phase"] == "saving"
    with pytest.raises(OSError, match="full"), activity.during(TrainerPhase.SAVING):
        raise OSError("full")
    assert (activity.words()["phase"], activity.words()["for_s"]) == ("training", 2.0)


@pytest.mark.parametrize(
    ("error", "stopped", "phase"),
    [
        (None, False, "finished"),
        (None, True, "stopped"),
        (KeyboardInterrupt(), False, "stopped"),
        (ValueError("no"), True, "failed"),
    ],
)
def test_an_end_is_a_finish_a_stop_or_a_failure(error: BaseException | None, stopped: bool, phase: str) -> None:
    activity = Activity(1)
    activity.end(error, stopped=stopped)
    assert activity.words()["phase"] == phase
    assert activity.words()["error"] == ("ValueError: no" if phase == "failed" else "")


# -- through a server --------------------------------------------------------------------------------------------------


def connect(buffer: Buffer, url: str, model_folder: Path, **settings: object) -> Consumer:
    given = ConsumerSettings.model_validate(settings)
    return Consumer.connect(url, run=buffer.run, weights=model_folder, settings=given)


def state(buffer: Buffer) -> TrainerState:
    found = buffer.trainer_state()
    assert found is not None
    return found


def test_a_custom_loop_is_seen_by_monitors(
    buffer: Buffer, server_url: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_lease, "HEARTBEAT_S", 0.02)
    make_run(buffer)
    assert buffer.trainer_state() is None
    with connect(buffer, server_url, model_folder, timeout_s=0.2) as consumer:
        wait_until(lambda: state(buffer).phase is TrainerPhase.STARTING)
        with pytest.raises(Exception, match="no batch for step 1"):
            next(consumer)
        wait_until(lambda: dict(state(buffer).wanted) == {"math": 2})
        assert state(buffer).phase is TrainerPhase.WAITING
        assert state(buffer).ready == {"math": 0}
        HandWorker(buffer, tiny_qwen3(1), tmp_path / "worker").produce(2)
        batch = next(consumer)
        wait_until(lambda: state(buffer).phase is TrainerPhase.TRAINING)
        with consumer.saving():
            wait_until(lambda: state(buffer).phase is TrainerPhase.SAVING)
        consumer.commit(batch)
        wait_until(lambda: state(buffer).phase is TrainerPhase.COMMITTED)
        assert not state(buffer).has_ended
    assert state(buffer).phase is TrainerPhase.FINISHED
    assert state(buffer).step == 1


def test_a_trainer_that_waits_for_the_archive_says_so(
    buffer: Buffer, server_url: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_lease, "HEARTBEAT_S", 0.02)
    world = World(buffer).start(math={"archive": True, "max_uncheckpointed_steps": 1})
    for step in (1, 2):
        world.complete(2)
        world.train(step)
        buffer.checkpoint(world.held, step)
    settings = ConsumerSettings(transport="path", weights_dir=tmp_path / "weights", takeover=True, timeout_s=0.2)
    with Consumer.connect(
        server_url, run=buffer.run, weights=model_folder, resume_from=2, settings=settings
    ) as consumer:
        world.complete(2)
        with pytest.raises(ClaimTimeout, match="waits for the archive: 4 groups; start `rollq archive`"):
            next(consumer)
        wait_until(lambda: dict(state(buffer).unarchived) == {"math": 4})
        Archiver(buffer, str(tmp_path), wait_s=0).finish(threading.Event())
        assert next(consumer).step == 3


def test_a_loop_that_raises_says_so_at_its_end(buffer: Buffer, server_url: str, model_folder: Path) -> None:
    make_run(buffer)
    with pytest.raises(ZeroDivisionError), connect(buffer, server_url, model_folder):
        raise ZeroDivisionError("a step of 0")
    assert (state(buffer).phase, state(buffer).error) == (TrainerPhase.FAILED, "ZeroDivisionError: a step of 0")


def test_the_words_of_a_trainer_that_was_replaced_are_not_those_of_its_successor(buffer: Buffer) -> None:
    world = World(buffer)
    held = world.start(math={}).held
    buffer.renew_trainer(held, {"phase": "failed", "step": 3, "for_s": 0.0, "error": "old"})
    assert state(buffer).has_ended
    world.begin(0, launch_id="second")
    assert state(buffer).phase is None
    assert state(buffer).lease_left_s > 0


def test_a_silent_trainer_is_heard_of_less_and_less(buffer: Buffer) -> None:
    held = World(buffer).start(math={}).held
    buffer.renew_trainer(held, {"phase": "training", "step": 3, "for_s": 2.5})
    said, words = buffer.send("HGET", buffer.keys.trainer, "doing").split(b" ", 1)
    earlier = int(said) - 60_000
    buffer.send("HSET", buffer.keys.trainer, "doing", b"%d %s" % (earlier, words), "deadline_ms", 1)
    assert state(buffer).silent_s >= 60
    assert state(buffer).for_s >= 62.5
    assert state(buffer).lease_left_s == 0
