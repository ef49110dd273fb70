"""The measurement of staleness: its plan, its statistics, and one run of all of it with few steps."""

import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from benchmarks import frontier, frontier_page
from benchmarks.frontier_page import Outcome, Row

from rollq.cli.demo.models import TINY

ROOT = Path(__file__).parents[1]


def outcome(held_out: float, *, loss: str = "ppo", bound: int = 0, seed: int = 1, rate: float = 5e-4) -> Outcome:
    return Outcome(loss, bound, seed, rate, held_out, [0.1, held_out], float(bound), 0.9, 0.01, 1.5, 0.002)


def test_the_cells_are_those_of_the_plan() -> None:
    cells = frontier.registered(frontier.LOSSES, frontier.STALENESS, frontier.SEEDS, frontier.STEPS)
    usual = [cell for cell in cells if cell.learning_rate == TINY.learning_rate]
    assert (len(usual), len(cells) - len(usual)) == (80, 10)
    assert len({cell.name for cell in cells}) == len(cells)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    page = (ROOT / "docs" / "frontier.md").read_text("utf-8")
    plan = page.partition(frontier_page.RESULTS)[0]
    assert all(f"`{loss}`" in plan for loss in frontier.LOSSES)
    assert f"{frontier.STEPS} steps" in plan
    assert f"in {frontier.PARITY_STEPS} steps" in plan


@pytest.mark.parametrize(
    ("stale", "verdict"), [([0.80, 0.84], "within"), ([0.70, 0.74], "**lower**"), ([0.92, 0.96], "higher")]
)
def test_a_cell_is_compared_with_staleness_0_by_the_pooled_deviation(stale: list[float], verdict: str) -> None:
    cells = [outcome(reward, seed=seed) for seed, reward in enumerate([0.82, 0.86])]
    cells += [outcome(reward, bound=4, seed=seed) for seed, reward in enumerate(stale)]
    cells += [outcome(0.1, bound=4, rate=2e-3)]
    at_zero, row, high = frontier_page.rows(cells)
    assert (at_zero.difference, at_zero.pooled, at_zero.verdict) == (None, None, "")
    assert at_zero.mean == pytest.approx(0.84)
    assert row.deviation == pytest.approx(0.02 * 2**0.5)
    assert row.difference == pytest.approx(sum(stale) / 2 - 0.84)
    assert row.pooled == pytest.approx(0.02 * 2**0.5)  # both have this deviation
    assert row.verdict == verdict
    assert row.paired == pytest.approx(0)  # each seed differs by as much
    assert (high.verdict, high.deviation) == ("", 0.0)  # nothing at this learning rate has bound 0


def test_one_seed_says_nothing_of_chance() -> None:
    row = Row([outcome(0.7, bound=1)], [outcome(0.8)])
    assert row.pooled == 0
    assert row.verdict == "**lower**"


def test_results_replace_the_last_section_and_keep_the_plan(tmp_path: Path) -> None:
    page = tmp_path / "frontier.md"
    page.write_text("# Title\n\n## Plan\n\nWords.\n\n## Results\n\nold\n")
    cells = [outcome(0.8), outcome(0.7, bound=4), outcome(0.2, bound=8, rate=2e-3)]
    frontier_page.write_results(tmp_path, cells, {1: 0.3}, (20, 2e-5), 100)
    text = page.read_text("utf-8")
    assert text.startswith("# Title\n\n## Plan\n\nWords.\n\n## Results\n\nParity: in 20 steps")
    assert "old" not in text
    assert "by at most 2e-05 nats" in text
    assert "| `ppo` | 4 | 0.700 ± 0.000 | -0.100 | 0.000 | **lower** | 0.000 |" in text
    assert "At learning rate 0.002:" in text
    assert (tmp_path / "frontier.png").stat().st_size > 10_000
    assert [cell["held_out"] for cell in orjson.loads((tmp_path / "frontier.json").read_bytes())] == [0.8, 0.7, 0.2]


@pytest.mark.slow
def test_a_small_frontier_runs_from_parity_to_the_page(tmp_path: Path) -> None:
    options = ["--losses", "ppo", "--staleness", "0", "2", "--seeds", "1", "--steps", "4"]
    command = [sys.executable, "-m", "benchmarks.frontier", *options, "--runs", "runs", "--docs", "docs"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "parity: 4 steps of `sync` and `async` are the same" in done.stdout
    text = (tmp_path / "docs" / "frontier.md").read_text("utf-8")
    assert len(re.findall(r"^\| `ppo` \|", text, re.MULTILINE)) == 3
