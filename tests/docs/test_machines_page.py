"""docs/guide/machines.md: its commands run, in a folder and with processes, per machine; a dead worker comes back."""

import shutil
from pathlib import Path

import pytest
import redis

from rollq.monitor.report.records import METRICS_FILE
from support.documented_commands import ROOT, Desk, blocks, code_with, kill, steps_trained

PAGE = ROOT / "docs" / "guide" / "machines.md"


@pytest.mark.slow  # three namespaces of roles that other pages start too
def test_three_machines_share_a_password_and_one_of_them_may_die(desk: Desk, sums: Path) -> None:
    terminals = [(block.detail, block.code) for block in blocks(PAGE) if block.mark == "terminal"]
    machines = [machine for machine, _ in terminals]
    assert machines == ["machine-1", "machine-1", "machine-2", "machine-3"]
    for machine in set(machines):
        shutil.copytree(sums, desk.folder / machine / "sums")
    shutil.rmtree(sums)
    without_torch = desk.folder / "without-torch"
    without_torch.mkdir()
    (without_torch / "torch.py").write_text("raise ModuleNotFoundError(name='torch')")
    metrics = desk.folder / "machine-1" / "sums" / "trainer" / METRICS_FILE
    status = f"cd machine-2\n{code_with(PAGE, 'rollq status')}"
    with desk:
        for number, (machine, code) in enumerate(terminals):
            if "rollq produce" in code:
                code = f"export PYTHONPATH={without_torch}:$PYTHONPATH\n{code}"
            desk.open(f"terminal {number}", code, machine)
            desk.wait_until(lambda: b"serving at" in desk.log("terminal 0").read_bytes())
        desk.wait_until(lambda: steps_trained(metrics) >= 2)
        assert "\ngpu0-" in (shown := desk.run(status))
        assert shown.startswith(("training: ", "starving: "))
        with redis.Redis(port=desk.port) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()

        kill(desk.terminals.pop("terminal 3"))
        desk.wait_until(lambda: " SILENT " in desk.run(status))
        desk.wait_until(lambda: desk.run(status).startswith("starving: "))
        trained = steps_trained(metrics)
        desk.open("terminal 3 again", terminals[3][1], "machine-3")
        desk.wait_until(lambda: steps_trained(metrics) >= trained + 2)
