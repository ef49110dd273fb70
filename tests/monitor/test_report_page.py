"""The report for a person: sentences, small tables, and what a good value looks like."""

import re
from typing import Any

import pytest

from rollq.monitor.report.page import REASONS, duration, lede, render_page
from rollq.monitor.report.records import BufferReading, StepRecord
from rollq.monitor.report.summary import summarize

IMAGES = {name: f"data:{name}" for name in ("reward", "staleness", "depth")}
END = BufferReading(
    time_s=10,
    depths={"sums": {"pending": 3, "archived": 10}, "sort": {"completed": 4, "archived": 2_000}},
    progress={"sums": {"admitted": 20, "dropped_trained": 7}, "sort": {"admitted": 2_005, "dropped_expired": 1}},
)


def run(wait_s: float = 0.1) -> list[StepRecord]:
    return [
        StepRecord(n, float(n), 0.5, {"sums": 0.5}, 1_000, {0: 250, 1: 750}, wait_s, 0.3, {"w": 6, "x": 2})
        for n in range(1, 4)
    ]


def summary_of(steps: list[StepRecord], end: BufferReading = END, **facts: object) -> dict[str, Any]:
    held_out = {"before": {"sums": 0.25, "sort": 0.75}, "after": {"sums": 0.5, "sort": 1.0}}
    return summarize(steps, [end], held_out=held_out, facts={"seed": 3, "train_s": 125.0, **facts})


def page(steps: list[StepRecord], summary: dict[str, Any]) -> str:
    """The text of the page; cells of a row are apart by `|`."""
    text = render_page("a run", summary, steps, IMAGES).partition("</style>")[2]
    return re.sub(r"<[^>]+>", "", re.sub(r"</t[dh]><t[dh][^>]*>", "|", text))


def test_it_says_in_a_sentence_how_the_run_went() -> None:
    said = lede(summary_of(run()))
    assert said == (
        "The trainer made 3 steps and trained 3,000 tokens in 2 min 05 s. The reward for prompts that it never saw "
        "rose from 0.50 to 0.75."
    )
    assert lede({}) == "The trainer made 0 steps and trained 0 tokens."


def test_each_table_answers_its_heading() -> None:
    text = page(run(), summary_of(run()))
    for part in (
        "Did the model learn?", "Held-out reward|before|after|change", "sums|0.250|0.500|+0.250",
        "all tasks, mean|0.500|0.750|+0.250",
        "How old were the trained tokens?", "0 (the newest)|25.0%", "1|75.0%",
        "Who waited for whom?", "waited for its batch|0.10 s|25%", "trained it|0.30 s|75%", "by at most 25%",
        "Where did the groups go?", "trained; kept until the next checkpoint covers their step|2,010",
        "trained, and covered by a checkpoint|7", "still in the buffer when the run ended|7", "too old to be trained|1",
        "all|2,025", "none was lost",
        "Which workers made the samples?", "w|18|75%", "x|6|25%",
        "About this run", "Seed|3", "Time|2 min 05 s",
    ):  # fmt: skip
        assert part in text, part
    for dump in ("conservation", "holds", "True", "staleness shares", "samples by worker"):
        assert dump not in text, dump


def test_it_says_so_when_groups_are_missing() -> None:
    assert "This is a bug of rollq" not in page(run(), summary_of(run()))
    lost = BufferReading(10, {}, END.progress)
    text = page(run(), summary_of(run(), lost))
    assert "groups were lost or counted twice. This is a bug of rollq." in text
    assert "none was lost" not in text


def test_a_trainer_that_hardly_waits_has_enough_workers() -> None:
    assert "the workers kept up" in page(run(wait_s=0.01), summary_of(run()))


def test_a_run_that_trained_nothing_has_a_page() -> None:
    text = page([], summarize([], [], held_out={}, facts={}))
    assert "The trainer made 0 steps" in text
    assert "Who waited for whom?" not in text


def test_names_that_a_user_has_given_are_escaped() -> None:
    summary = summary_of(run())
    summary["samples_by_worker"] = {"<b>": 1}
    shown = render_page("<i>", summary, run(), IMAGES)
    assert "&lt;b&gt;" in shown
    assert "<b>" not in shown
    assert "<i>" not in shown


def test_reasons_that_it_does_not_know_are_shown_by_their_name() -> None:
    assert "brand_new" not in REASONS
    end = BufferReading(10, {}, {"sums": {"admitted": 2, "dropped_brand_new": 2}})
    assert "brand_new|2" in page(run(), summary_of(run(), end))


@pytest.mark.parametrize(("seconds", "shown"), [(48.4, "48 s"), (59.6, "1 min 00 s"), (4320, "1 h 12 min")])
def test_a_duration_reads_as_people_say_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
