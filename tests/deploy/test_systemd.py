"""deploy/systemd: systemd reads the units, `rollq` parses their commands, and all keep the same rules."""

import configparser
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollq.cli.main import main
from rollq.cli.settings.file import load_settings
from support.compose_file import COMPOSE

UNITS = sorted((Path(__file__).parents[2] / "deploy" / "systemd").glob("*.service"))


def service(unit: Path) -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(unit.read_text("utf-8"))
    return parser["Service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_understands_the_unit(unit: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze on the PATH")
    copy = tmp_path / unit.name
    installed = str(Path(sys.executable).with_name("rollq"))
    copy.write_text(unit.read_text("utf-8").replace("/opt/rollq/bin/rollq", installed), "utf-8")
    result = subprocess.run([program, "verify", "--man=no", str(copy)], capture_output=True, text=True)
    assert (result.returncode, [line for line in result.stderr.splitlines() if unit.name in line]) == (0, [])


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_unit_runs_a_command_that_rollq_knows(unit: Path) -> None:
    program, name, *arguments = shlex.split(service(unit)["ExecStart"].replace("%i", "0"))
    assert program == "/opt/rollq/bin/rollq"
    command = main.get_command(main.make_context("rollq", [name, "--help"], resilient_parsing=True), name)
    assert command is not None
    assert command.make_context(name, arguments).params["file"] == Path("/etc/rollq/rollq.toml")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_the_unit_has_no_rights_and_its_password_is_a_credential(unit: Path) -> None:
    given = service(unit)
    assert given["User"] == "rollq-role"
    assert (given["NoNewPrivileges"], given["CapabilityBoundingSet"], given["ProtectSystem"]) == ("yes", "", "strict")
    assert given["LoadCredential"].startswith("password:/etc/rollq/")
    assert "ROLLQ_REDIS_PASSWORD_FILE=%d/password" in unit.read_text("utf-8")


def test_a_role_that_ends_well_stays_away_and_a_worker_has_time_to_drain() -> None:
    assert {service(unit)["Restart"] for unit in UNITS} == {"on-failure"}
    (worker,) = [unit for unit in UNITS if "worker" in unit.name]
    grace_s = load_settings(COMPOSE / "rollq-gpu.toml", {}).worker.grace_s
    assert int(service(worker)["TimeoutStopSec"]) >= grace_s + 10
    assert service(worker)["KillSignal"] == "SIGTERM"
