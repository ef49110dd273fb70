"""Benchmarks run and give sane figures. How fast anything is depends on the machine, and no test asserts it."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from benchmarks import learning

ROOT = Path(__file__).parents[1]


def run_benchmarks(folder: Path, *options: str) -> None:
    """`python -m benchmarks --quick` with `folder` as the working directory."""
    command = [sys.executable, "-m", "benchmarks", "--quick", *options]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def check_figures(results: Path) -> None:
    written = orjson.loads(results.read_bytes())
    assert written["machine"]["cores"] > 0
    assert written["machine"]["server"].startswith("Valkey ")
    assert written["results"]
    for result in written["results"]:
        assert result["target"] > 0
        assert 0 < result["measured"] < math.inf
        assert all(value > 0 for value in result["values"])
        first, third = result["quartiles"]
        assert first <= result["measured"] <= third


NIGHTLY = (
    "tickets", "expiry", "wakeup", "fleet", "gateway", "ranks", "logprobs", "publication", "watching", "watched",
    "bystanders", "archive", "production", "sustained", "cluster", "stores", "scaling", "slots", "membership",
)  # fmt: skip
"""Benchmarks that `make test-slow` runs; each starts processes for a quarter of a minute or more."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["exchange", *(pytest.param(name, marks=pytest.mark.slow) for name in NIGHTLY)])
def test_a_quick_benchmark_runs_and_writes_sane_figures(name: str, tmp_path: Path) -> None:
    run_benchmarks(tmp_path, "--only", name, "--output", "results.json")
    check_figures(tmp_path / "results.json")


@pytest.mark.slow
def test_one_benchmark_writes_its_table_between_the_words_and_no_results_of_all(
    tmp_path: Path,
) -> None:
    page = tmp_path / "docs" / "benchmarks.md"
    page.parent.mkdir()
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text() + "The last words.\n")
    before = page.read_text()

    (tmp_path / "benchmarks").mkdir()
    kept = tmp_path / "benchmarks" / "results.json"
    kept.write_text("the results of all")

    run_benchmarks(tmp_path, "--only", "claim", "--write-docs")

    assert kept.read_text() == "the results of all"
    after = page.read_text()
    assert after.startswith(before[: before.index("<!-- table")])
    assert after.endswith("The last words.\n")
    assert (
        "| claim of 256 groups out of 20,000 completed, order priority, against out of 1,000 | ≤ 2 times as long |"
        in after
    )


def test_the_process_of_a_store_measures_requests_on_its_standard_input() -> None:
    requests = "".join(f"[16, 56, {groups}, 2]\n" for groups in (1, 16))
    command = [sys.executable, "-m", "benchmarks.peers.through_rollq"]
    printed = subprocess.run(command, cwd=ROOT, input=requests, stdout=subprocess.PIPE, text=True, check=True).stdout
    version, *seconds = printed.splitlines()
    assert version.startswith("rollq ")
    assert len(seconds) == 2
    assert all(float(each) > 0 for each in seconds)


def test_the_memory_of_a_full_run_is_below_the_formula() -> None:
    command = [sys.executable, "-m", "benchmarks.memory", "--quick"]
    printed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    header, *rows = [re.split(" {2,}", line) for line in printed.splitlines()]
    assert rows
    assert all(0.3 < float(dict(zip(header, row, strict=True))["used / formula"]) < 1 for row in rows)


def test_the_page_about_learning_keeps_the_part_of_the_model_that_was_not_measured() -> None:
    page = learning.with_part("# Learning\n\nold\n", learning.PRETRAINED, f"{learning.PRETRAINED}\n\nfirst")
    assert page == f"# Learning\n\nold\n\n{learning.PRETRAINED}\n\nfirst\n"
    page = learning.with_part(page, "", "# Learning\n\nnew")
    assert page == f"# Learning\n\nnew\n\n{learning.PRETRAINED}\n\nfirst\n"
    assert learning.with_part(page, learning.PRETRAINED, f"{learning.PRETRAINED}\n\nsecond").endswith(
        f"new\n\n{learning.PRETRAINED}\n\nsecond\n"
    )
    assert learning.with_part("", "", "# Learning\n\nnew") == "# Learning\n\nnew\n"
