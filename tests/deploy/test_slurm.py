"""deploy/slurm: a linter and a shell read the scripts; whole jobs run, with an `srun` that only runs its command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollq.buffer.common.ports import free_port
from rollq.monitor.report.records import METRICS_FILE
from support.documented_commands import steps_trained
from support.waiting import PATIENCE_S, wait_until

SLURM = Path(__file__).parents[2] / "deploy" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
SRUN = """#!/bin/sh
while :; do
    case "$1" in
    --*=* | --overlap) shift ;;
    --*) shift 2 ;;
    *) break ;;
    esac
done
SLURM_LOCALID=0 exec "$@"
"""
"""A stand-in: it drops Slurm's options and runs the command here, once."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_linter_and_a_shell_have_nothing_to_say(script: Path) -> None:
    for command in ([str(Path(sys.executable).with_name("shellcheck"))], ["bash", "-n"]):
        assert subprocess.run([*command, str(script)], capture_output=True, text=True).stdout == ""


class Job:
    """A folder with the demo of two steps, and the environment of a job of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.settings = folder / "sums" / "rollq.toml"
        self.environment = {
            "PATH": f"{folder / 'bin'}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.defpath}",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURMD_NODENAME": "localhost",
            "ROLLQ_PORT": str(free_port("127.0.0.1")),
        }

    def start(self, script: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{script}.log").open("wb") as log:
            command = ["bash", str(SLURM / script), str(self.settings), *arguments]
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )

    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("*.log"))


@pytest.fixture
def job(prepared_demo: Path, tmp_path: Path) -> Job:
    shutil.copytree(prepared_demo, tmp_path / "sums")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "srun").write_text(SRUN)
    (tmp_path / "bin" / "srun").chmod(0o755)
    return Job(tmp_path)


@pytest.mark.slow  # the next test has a job that trains, and more
def test_a_job_trains_to_the_end_and_leaves_nothing_behind(job: Job) -> None:
    text = job.settings.read_text("utf-8")
    job.settings.write_text(text.replace("steps = 150", "steps = 2"), "utf-8")
    assert job.start("run.sbatch").wait(PATIENCE_S) == 0, job.log()
    assert steps_trained(job.folder / "sums" / "trainer" / METRICS_FILE) == 2
    assert left_behind(job) == []


@pytest.mark.slow  # starts and stops of roles are in tests/docs/test_readme.py
def test_a_job_that_is_stopped_saves_a_checkpoint_and_its_workers_may_come_and_leave(job: Job) -> None:
    running = job.start("run.sbatch")
    metrics = job.folder / "sums" / "trainer" / METRICS_FILE
    wait_until(
        lambda: running.poll() is not None or (metrics.exists() and steps_trained(metrics) >= 1), otherwise=job.log
    )
    worker = job.start("workers.sbatch", str(job.folder / "rollq-4711"))
    wait_until(lambda: worker.poll() is not None or "listens on" in worker_log(job), otherwise=job.log)
    worker.terminate()
    assert worker.wait(PATIENCE_S) == 0, job.log()
    running.terminate()
    assert running.wait(PATIENCE_S) == 143, job.log()
    assert "stopped after step" in job.log()
    assert list((job.folder / "sums" / "trainer" / "checkpoints").iterdir())
    assert left_behind(job) == []
    password = (job.folder / "rollq-4711" / "password").read_text()
    assert len(password) == 64
    assert password not in job.log()


def worker_log(job: Job) -> str:
    return (job.folder / "workers.sbatch.log").read_text()


def left_behind(job: Job) -> list[str]:
    """The arguments of processes that name the job's folder."""
    found = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if str(job.folder) in line]
