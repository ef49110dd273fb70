"""docs/guide/import.md: its commands run, and it names every column."""

from pathlib import Path

from rollq.buffer.buffer import Buffer
from rollq.cli import finished_rows
from support.documented_commands import ROOT, Desk, blocks, files

PAGE = ROOT / "docs" / "guide" / "import.md"


def test_every_command_of_the_page_runs(desk: Desk, sums: Path) -> None:
    task = next(block.code for block in blocks(PAGE) if block.language == "toml")
    settings = sums / "rollq.toml"
    settings.write_text(f"{settings.read_text()}\n{task}".replace("6379", str(desk.port)))
    for name, content in files(PAGE).items():
        (desk.folder / name).write_text(desk.local(content))
    check, import_, insert = [block.code for block in blocks(PAGE) if block.language == "bash"]
    warning, checked = desk.run(check).splitlines()
    assert warning.startswith("warning: 4 of 4 groups have no logprobs")
    assert checked == "4 groups of expert.jsonl can be imported"
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


def test_the_page_names_every_column() -> None:
    text = PAGE.read_text("utf-8")
    columns = {*finished_rows.RESPONSES, *finished_rows.REWARDS, finished_rows.LOGPROBS}
    assert [name for name in columns if f"`{name}`" not in text] == []
