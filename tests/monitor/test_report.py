import re
from pathlib import Path

import orjson
import pytest

from rollq.monitor.report.records import (
    BufferReading,
    StepRecord,
    append_line,
    read_buffer_readings,
    read_steps,
)
from rollq.monitor.report.report import running_mean, write_report

PNG = b"\x89PNG\r\n\x1a\n"


def step(number: int, **changes: object) -> dict[str, object]:
    line: dict[str, object] = {
        "step": number,
        "time_s": 1000.0 + number,
        "reward": 0.5,
        "rewards": {"sums": 0.25, "sorting": 0.75},
        "tokens": 30,
        "staleness_tokens": {"0": 10, "1": 20},
        "wait_s": 0.5,
        "train_s": 0.25,
    }
    return {**line, **changes}


def test_a_step_that_was_trained_again_counts_once_with_its_last_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for line in (step(1), step(2, reward=0.1), step(2, reward=0.9), step(3)):
        append_line(path, line)
    read = read_steps(path)
    assert [s.step for s in read] == [1, 2, 3]
    assert read[1].reward == 0.9
    assert read[0].staleness_tokens == {0: 10, 1: 20}


def test_a_line_that_is_still_being_written_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, step(1))
    with path.open("ab") as file:
        file.write(b'{"step": 2, "rew')
    assert [s.step for s in read_steps(path)] == [1]


def test_a_snapshot_survives_its_line(tmp_path: Path) -> None:
    path = tmp_path / "depth.jsonl"
    snapshot = BufferReading(5.0, {"sums": {"pending": 3}}, {"sums": {"admitted": 7.0}}, {"w": {"version": 2}}, 2)
    append_line(path, snapshot.as_dict())
    assert read_buffer_readings(path) == [snapshot]


def test_a_run_without_files_has_no_steps(tmp_path: Path) -> None:
    assert read_steps(tmp_path / "absent.jsonl") == []


def test_the_report_opens_offline_and_holds_the_same_numbers_as_its_json(tmp_path: Path) -> None:
    steps = [StepRecord(n, 1000.0 + n, n / 10, {"sums": n / 10}, 30, {0: 10, 1: 20}) for n in range(1, 6)]
    snapshots = [BufferReading(1000.0 + n, {"sums": {"pending": n, "archived": 10 * n}}) for n in range(4)]
    summary = {"title <b>": "a & b", "held_out": {"before": {"sums": 0.2}, "after": {"sums": 0.6}}, "tokens": 150_000}
    page = write_report(tmp_path / "report", "run <1>", summary, steps, snapshots)
    text = page.read_text()
    assert "run &lt;1&gt;" in text
    assert "a &amp; b" in text
    assert "150,000" in text
    assert '<td class="n">0.600</td>' in text
    assert [match[:22] for match in re.findall(r'(?:src|href)="([^"]*)"', text)] == ["data:image/png;base64,"] * 3
    for name in ("reward", "staleness", "depth"):
        assert (page.parent / f"{name}.png").read_bytes().startswith(PNG)
    data = orjson.loads((page.parent / "report.json").read_bytes())
    assert data["summary"]["held_out"]["after"] == {"sums": 0.6}
    assert data["reward"]["tasks"] == {"sums": [0.1, 0.2, 0.3, 0.4, 0.5]}
    assert data["staleness"]["tokens"] == {"0": [10] * 5, "1": [20] * 5}
    assert data["depth"]["tasks"]["sums"]["archived"] == [0, 10, 20, 30]


def test_a_run_that_never_trained_still_gets_a_report(tmp_path: Path) -> None:
    page = write_report(tmp_path / "report", "empty", {"steps": 0}, [], [])
    assert page.exists()


def test_a_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], window=2) == pytest.approx([1.0, 2.0, 4.0, 6.0])
    assert running_mean([], window=2) == []
