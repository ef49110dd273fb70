"""docs/guide/machines.md: every terminal's commands run, in a folder per machine."""

import shutil
from pathlib import Path

import pytest
import redis

from rollq.monitor.records import METRICS_FILE
from support.documented_commands import ROOT, Desk, blocks, steps_trained

PAGE = ROOT / "docs" / "guide" / "machines.md"


def test_the_roles_run_on_several_machines_that_share_a_password(desk: Desk, sums: Path) -> None:
    terminals = [(block.detail, block.code) for block in blocks(PAGE) if block.mark == "terminal"]
    for machine in {machine for machine, _ in terminals}:
        shutil.copytree(sums, desk.folder / machine / "sums")
    shutil.rmtree(sums)
    without_torch = desk.folder / "without-torch"
    without_torch.mkdir()
    (without_torch / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    metrics = desk.folder / "machine-1" / "sums" / "trainer" / METRICS_FILE
    with desk:
        for number, (machine, code) in enumerate(terminals):
            if "rollq produce" in code:
                code = f"export PYTHONPATH={without_torch}\n{code}"
            desk.open(f"terminal {number}", code, machine)
            desk.wait_until(lambda: b"serving at" in desk.log("terminal 0").read_bytes())
        desk.wait_until(lambda: steps_trained(metrics) >= 2)
        with redis.Redis(port=desk.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
