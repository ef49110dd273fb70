"""docs/guide/trl.md: its trainer trains in two ranks, ends at Ctrl-C with a checkpoint, and resumes."""

import os
import signal
from pathlib import Path

import pytest

from support.documented_commands import ROOT, Desk, code_with, files, terminals
from support.forked_ranks import run_script

PAGE = ROOT / "docs" / "guide" / "trl.md"


@pytest.mark.long
def test_the_trainer_of_the_page_stops_and_resumes(desk: Desk, sums: Path) -> None:
    serve, produce, work, *_ = terminals(ROOT / "README.md")
    config, script = sums / "rollq.toml", desk.folder / "train_trl.py"
    config.write_text(desk.local(config.read_text("utf-8")))
    with desk:
        desk.open("redis", serve)
        desk.wait_until(lambda: b"serving at" in desk.log("redis").read_bytes())
        desk.open("produce", produce)
        desk.open("work", work)
        script.write_text(desk.local(files(PAGE)[script.name]).replace("max_steps=20", "max_steps=1000"))
        desk.open("train", f"exec {code_with(PAGE, script.name)}")
        desk.wait_until(lambda: b"grad_norm" in desk.log("train").read_bytes())
        os.kill(desk.terminals["train"].pid, signal.SIGINT)
        assert desk.terminals.pop("train").wait() == 0, desk.log("train").read_text()
        (mark,) = (sums / "trl").glob("checkpoint-*/rollq.json")
        last = int(mark.parent.name.removeprefix("checkpoint-"))
        script.write_text(script.read_text().replace("max_steps=1000", f"max_steps={last + 2}"))
        assert run_script(script, 2).count("grad_norm") == 2
        assert (sums / "trl" / f"checkpoint-{last + 2}" / "rollq.json").is_file()
