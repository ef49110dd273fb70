"""The page on losses names all of them, and its example runs."""

import re
import runpy
from pathlib import Path

import pytest

from rollq.consumer.losses import PRESETS, LossSettings
from support.documented_commands import ROOT, code_with

PAGE = ROOT / "docs" / "guide" / "losses.md"


def test_the_page_has_every_preset_and_no_other() -> None:
    table = PAGE.read_text("utf-8").split("## Presets")[1].split("## Parts")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(PRESETS)


def test_the_page_says_over_what_the_terms_of_a_preset_are_averaged() -> None:
    table = PAGE.read_text("utf-8").split("## Presets")[1].split("## Parts")[0]
    words = {"tokens": "token", "tokens of a sample, then samples": "sequence", "as `grpo`": "sequence"}
    rows = re.findall(r"^\| `(\w+)`.*? \| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)
    found = {name: words.get(mean, "constant") for name, mean in rows}
    assert found == {name: LossSettings(preset=name).aggregation for name in PRESETS}


def test_the_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "example.py").write_text(code_with(PAGE, "policy_terms"))
    runpy.run_path(str(tmp_path / "example.py"))
    # -(1.0004 - 0.5 * 0.9997) / 2: both samples moved as far as they should
    assert capsys.readouterr().out == "-0.2503, clipped: [True, True, True]\n"
