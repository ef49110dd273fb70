from dataclasses import replace

from rollq.monitor.report.records import BufferReading, StepRecord
from rollq.monitor.report.summary import (
    conservation,
    samples_by_worker,
    summarize,
    summary_lines,
)

END = BufferReading(
    time_s=10,
    depths={"sums": {"pending": 3, "archived": 10}, "sort": {"completed": 4, "archived": 20}},
    progress={"sums": {"admitted": 20, "dropped_trained": 7}, "sort": {"admitted": 25, "dropped_expired": 1}},
)


def test_groups_are_conserved_when_each_is_archived_in_the_buffer_or_counted_as_dropped() -> None:
    kept = conservation(END)
    assert (kept["admitted"], kept["archived"], kept["in_buffer"]) == (45, 30, 7)
    assert kept["dropped"] == {"trained": 7, "expired": 1}
    assert kept["holds"]
    assert not conservation(replace(END, depths={}))["holds"]


def test_a_worker_that_died_keeps_the_samples_it_made() -> None:
    steps = [StepRecord(1, 1.0, 0.5, workers={"a": 5, "b": 3}), StepRecord(2, 2.0, 0.5, workers={"b": 8})]
    assert samples_by_worker(steps) == {"a": 5, "b": 11}


def test_the_summary_says_what_was_learned_and_where_the_groups_are() -> None:
    steps = [StepRecord(n, float(n), 0.5, {"sums": 0.5}, 100, {0: 25, 1: 75}, workers={"w": 8}) for n in range(1, 4)]
    held_out = {"before": {"sums": 0.25, "sort": 0.75}, "after": {"sums": 0.5, "sort": 1.0}}
    summary = summarize(steps, [END], held_out=held_out, facts={"seed": 3, "train_s": 12.0})
    assert summary["seed"] == 3
    assert summary["held_out"]["after"] == {"sums": 0.5, "sort": 1.0, "mean": 0.75}
    assert summary["staleness_shares"] == {"0": 0.25, "1": 0.75}
    text = "\n".join(summary_lines(summary))
    for part in (
        "3 steps, 300 tokens trained in 12 s",
        "held-out reward, mean: 0.500 -> 0.750 (+0.250)",
        "(staleness): 25.0% are 0, 75.0% are 1",
        "w: 24",
        "all 45 that were admitted are accounted for: 37 trained, 7 still in the buffer, 1 expired",
    ):
        assert part in text, part
    lost = {**summary, "conservation": {**summary["conservation"], "holds": False}}
    assert "45 WERE ADMITTED, BUT THESE DO NOT ADD UP: 37 trained" in "\n".join(summary_lines(lost))
