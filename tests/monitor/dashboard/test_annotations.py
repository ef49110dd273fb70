"""Pages wait for what a trainer wrote only briefly, and say why there is nothing."""

import threading
from dataclasses import replace

import pytest

from rollq.buffer.archive.annotations import Annotation, Annotations
from rollq.buffer.calls.group_details import FoundGroup, TrainStep
from rollq.buffer.values.rollouts import Prompt, Status
from rollq.monitor.dashboard.trainer_values import TrainedReader, trained_step, values_of
from rollq.monitor.groups.view import SegmentView

TRAINED = FoundGroup("math", 7, Status.ARCHIVED, {}, Prompt("p"), (), "", (), TrainStep(3, 1, 2), None, 5)
SEGMENT = SegmentView((1,), (5, 6), None, (0, 0), (True, False), (-0.5, -1.0))


class Hanging:
    """An archive that does not answer until `answers` is set."""

    def __init__(self) -> None:
        self.answers = threading.Event()

    def of_group(self, task: str, group_id: int, step: int) -> Annotations:
        self.answers.wait()
        return {(0, 0): Annotation(1.0, {"ratio": [1.0]})}


def test_an_archive_that_hangs_is_said_and_read_when_it_answers() -> None:
    archive = Hanging()
    reader = TrainedReader(lambda: archive, wait_s=0.01)
    for _ in range(2):
        assert "does not answer within 0.01 s" in reader.of(TRAINED).note
    archive.answers.set()
    found = TrainedReader(lambda: archive, wait_s=60).of(TRAINED)
    assert (found.note, found.annotations[0, 0].advantage) == ("", 1.0)


def test_a_page_says_why_there_is_nothing() -> None:
    assert TrainedReader(lambda: "set url in [archive]").of(TRAINED).note == "set url in [archive]"
    assert "has not trained" in TrainedReader(Hanging).of(replace(TRAINED, batch=None)).note


def test_a_group_that_waits_for_the_archive_was_trained_at_its_step() -> None:
    leaving = replace(TRAINED, batch=None, fields={"left": "trained", "trained_step": "4"})
    assert trained_step(leaving) == 4
    assert trained_step(replace(leaving, fields={"left": "by_hand", "trained_step": "4"})) is None


@pytest.mark.parametrize("written", [{"mismatch": [0.25, None]}, {"logprob": [-0.25, None]}])
def test_the_trainers_logprob_and_its_mismatch_follow_from_each_other(written: dict[str, list[float | None]]) -> None:
    assert values_of(SEGMENT, Annotation(None, written)) == {"mismatch": [0.25, None], "trainer logprob": [-0.25, None]}


def test_values_of_another_length_are_left_out() -> None:
    assert values_of(SEGMENT, Annotation(None, {"ratio": [1.0]})) == {}
