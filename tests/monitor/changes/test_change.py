"""A new state counts once it has lasted, and one that comes and goes does not."""

from rollq.monitor.changes.change import UNREADABLE, Look, Steady
from rollq.monitor.status.diagnosis import State, diagnose
from support.run_statuses import run_status


def counted(steady: Steady, *seen: tuple[float, str]) -> list[tuple[float, str]]:
    """The times and states at which a new one counts."""
    return [(at_s, state) for at_s, state in seen if steady.has_changed(state, at_s)]


def test_a_state_counts_once_it_has_lasted() -> None:
    steady = Steady("training", 60)
    seen = [(float(at_s), "training" if at_s < 100 else "failing") for at_s in range(0, 400, 5)]
    assert counted(steady, *seen) == [(160, "failing")]
    assert steady.state == "failing"


def test_a_state_that_comes_and_goes_does_not_count() -> None:
    steady = Steady("paused", 60)
    seen = [(float(at_s), "starving" if at_s % 70 > 20 else "training") for at_s in range(0, 700, 5)]
    assert counted(steady, *seen) == []
    assert counted(steady, (700, "training"), (759, "training"), (760, "training")) == [(760, "training")]
    assert counted(steady, *((760 + at_s, state) for at_s, state in seen)) == []


def test_a_state_that_is_interrupted_starts_over() -> None:
    steady = Steady("c", 60)
    seen = [(0, "a"), (60, "a"), (70, "b"), (120, "b"), (125, "c"), (130, "b"), (189, "b"), (190, "b")]
    assert counted(steady, *seen) == [(60, "a"), (190, "b")]


def test_a_finished_run_counts_at_once() -> None:
    steady = Steady("training", 60)
    assert counted(steady, (0, "training"), (1, "starving"), (2, State.FINISHED)) == [(2, "finished")]


def test_without_a_time_each_state_counts_when_it_is_seen() -> None:
    assert counted(Steady("b", 0), (0, "a"), (1, "b"), (2, "b"), (3, "a")) == [(0, "a"), (1, "b"), (3, "a")]


def test_a_look_has_the_words_of_the_diagnosis_or_why_there_is_none() -> None:
    status = run_status(trainer=None)
    look, found = Look.at(status, ""), diagnose(status)
    assert look.facts("sums", "unreadable") == {
        "run": "sums",
        "before": "unreadable",
        "state": "starting",
        "sentence": found.sentence,
        "remedies": list(found.remedies),
    }
    assert Look.at(None, "redis://a: no answer") == Look(UNREADABLE, "redis://a: no answer")
