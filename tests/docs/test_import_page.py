"""docs/guide/import.md: its commands run, and it names every column."""

from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.cli.imports import finished_rows
from rollq.monitor.report.records import METRICS_FILE, read_lines
from support.documented_commands import ROOT, Desk, blocks, files, steps_trained

PAGE = ROOT / "docs" / "guide" / "import.md"


@pytest.mark.long
def test_every_command_of_the_page_runs(desk: Desk, sums: Path) -> None:
    task = next(block.code for block in blocks(PAGE) if block.language == "toml")
    settings = sums / "rollq.toml"
    settings.write_text(f"{settings.read_text()}\n{task}".replace("6379", str(desk.port)))
    for name, content in files(PAGE).items():
        (desk.folder / name).write_text(desk.local(content))
    check, import_, insert = [block.code for block in blocks(PAGE) if block.language == "bash"]
    assert desk.run(check) == "4 groups of expert.jsonl can be imported\n"
    with desk:
        desk.open("server", "rollq redis --dir sums/server")
        desk.wait_until(lambda: "serving at" in desk.log("server").read_text())
        shown = desk.run(import_)
        assert "imported 4 groups of expert.jsonl" in shown
        assert "expert: offline: 4 groups were inserted so far" in shown
        assert "inserted from sha256:" in shown
        assert desk.run(insert) == "3 groups are new\n0 groups are new\n"
        with Buffer.connect(f"redis://127.0.0.1:{desk.port}/0", "demo") as buffer:
            assert buffer.counts("expert").ready == 7


@pytest.mark.slow  # tests/consumer/test_inserted.py has the same without processes
def test_an_import_that_the_loss_has_no_use_for_leaves_a_running_trainer_alone(desk: Desk, sums: Path) -> None:
    """The file of the import has the trainer's settings, and then other ones: the trainer trains on."""
    task, loss = next(block.code for block in blocks(PAGE) if block.language == "toml").split("\n\n")
    run = (sums / "rollq.toml").read_text().replace("6379", str(desk.port))
    (sums / "rollq.toml").write_text(f"{run}\n{task}")
    (sums / "current.toml").write_text(f"{run}\n{task}\n{loss}")
    (desk.folder / "expert.jsonl").write_text(files(PAGE)["expert.jsonl"])
    metrics = sums / "trainer" / METRICS_FILE
    samples = "expert expert.jsonl"
    with desk:
        desk.open("server", "rollq redis --dir sums/server")
        desk.wait_until(lambda: "serving at" in desk.log("server").read_text())
        for role in ("produce", "work", "train"):
            desk.open(role, f"rollq {role} sums/rollq.toml")
        refused = desk.run(f"rollq import sums/rollq.toml {samples} 2>&1 || test $? -eq 2")
        assert "4 of 4 groups have no logprobs, and the loss in [trainer] needs them" in refused
        desk.run(f"rollq import sums/current.toml {samples}")
        desk.wait_until(lambda: steps_trained(metrics) >= 1)
        assert next(read_lines(metrics))["without_logprobs"]["expert"] > 0
        assert "samples of task 'expert' were inserted without logprobs" in desk.log("train").read_text()
        desk.interrupt("train")


def test_the_page_names_every_column() -> None:
    text = PAGE.read_text("utf-8")
    columns = {*finished_rows.RESPONSES, *finished_rows.REWARDS, finished_rows.LOGPROBS}
    assert [name for name in columns if f"`{name}`" not in text] == []
