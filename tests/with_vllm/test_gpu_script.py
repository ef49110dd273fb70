"""The script for machines with GPUs, as far as it runs on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.vllm_run import cpu_environment
from support.waiting import PATIENCE_S


@pytest.mark.slow  # its cases have tests of their own here
def test_a_case_is_run_and_described_on_the_page(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    command = [sys.executable, "-m", "gpu", "--device", "cpu", "--only", "bfloat16", "--only", "broadcast"]
    environment = {**os.environ, **cpu_environment(), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "--output", str(page)], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1, "no GPU sends weights"
    assert "failed: broadcast" in done.stderr
    text = page.read_text()
    (passed,) = [line for line in text.splitlines() if line.startswith("| **bfloat16**")]
    assert "| passed |" in passed
    assert "tokens off, mean: 0.0" in passed
    assert "0.15 allowed" in passed
    (failed,) = [line for line in text.splitlines() if line.startswith("| **broadcast**")]
    assert "| failed: " in failed


def test_a_machine_without_gpus_is_named(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "gpu"], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 1
    assert "Error: no GPU is visible here" in done.stderr
