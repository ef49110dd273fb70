"""docs/guide/first-run.md: its files and commands, and the messages that it quotes."""

import re
import shutil
from pathlib import Path

from rollq.monitor.report.records import METRICS_FILE
from support.demo_folder import PREPARE
from support.documented_commands import ROOT, Desk, code_with, files, steps_trained, terminals

PAGE = ROOT / "docs" / "guide" / "first-run.md"


def test_the_first_run_trains(desk: Desk, prepared_demo: Path) -> None:
    desk.run(code_with(PAGE, "mkdir"))
    desk.folder /= "first-run"
    for name, content in files(PAGE).items():
        (desk.folder / name).write_text(desk.local(content))
    assert code_with(PAGE, "--prepare").split() == [*PREPARE[:-1], "start"]
    shutil.copytree(prepared_demo, desk.folder / "start")
    assert desk.run(code_with(PAGE, "make_prompts.py")) == '{"prompt": "sort 1872=", "answer": "8721"}\n'
    serve, produce, work, _, train = terminals(PAGE)
    with desk:
        desk.open("redis", serve)
        desk.wait_until(lambda: b"serving at" in desk.log("redis").read_bytes())
        for name, command in (("produce", produce), ("work", work), ("train", train)):
            desk.open(name, command)
        desk.wait_until(lambda: steps_trained(desk.folder / "trainer" / METRICS_FILE) >= 2)
        assert desk.run(code_with(PAGE, "rollq status")).startswith(("training: ", "starving: "))


def test_the_messages_on_the_page_are_those_of_the_roles() -> None:
    sources = "".join(path.read_text("utf-8") for path in ROOT.glob("*/rollq/**/*.py"))
    table = PAGE.read_text("utf-8").split("## When nothing moves")[1]
    shown = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")][1:]
    quoted = [quote for cell in shown for quote in re.findall("`([^`]+)`", cell) if not quote.startswith("rollq ")]
    assert len(quoted) >= 6
    missing = [q for q in quoted if any(part not in sources for part in re.split(r" \.\.\. |'\w+'", q))]
    assert missing == []
