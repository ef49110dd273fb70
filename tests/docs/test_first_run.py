"""docs/guide/first-run.md: its files and commands, and the messages that it quotes."""

import re

import pytest

from rollq.monitor.report.records import METRICS_FILE
from support.documented_commands import ROOT, Desk, code_with, files, steps_trained

PAGE = ROOT / "docs" / "guide" / "first-run.md"


@pytest.mark.long
def test_the_first_run_trains_and_stops(desk: Desk) -> None:
    desk.run(code_with(PAGE, "rollq init"))
    desk.folder /= "first-run"
    for name, content in files(PAGE).items():
        (desk.folder / name).write_text(content)
    assert "nothing is wrong" in desk.run(code_with(PAGE, "rollq try"))
    config = desk.folder / "rollq.toml"
    config.write_text(desk.local(config.read_text("utf-8")).replace("steps = 40", "steps = 4000"))
    with desk:
        desk.open("up", code_with(PAGE, "rollq up"))
        desk.wait_until(lambda: steps_trained(desk.folder / "trainer" / METRICS_FILE) >= 2)
        assert desk.run(code_with(PAGE, "rollq status")).startswith(("training: ", "starving: "))
        desk.interrupt("up")
    assert "`rollq up rollq.toml` continues" in desk.log("up").read_text()
    assert list((desk.folder / "trainer" / "checkpoints").iterdir())


def test_the_messages_on_the_page_are_those_of_the_roles() -> None:
    sources = "".join(path.read_text("utf-8") for path in ROOT.glob("*/rollq/**/*.py"))
    table = PAGE.read_text("utf-8").split("## If training does not progress")[1]
    shown = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")][1:]
    quoted = [quote for cell in shown for quote in re.findall("`([^`]+)`", cell) if not quote.startswith("rollq ")]
    assert len(quoted) >= 6
    missing = [q for q in quoted if any(part not in sources for part in re.split(r" \.\.\. |'\w+'", q))]
    assert missing == []
