import os
import subprocess
from pathlib import Path

import pytest

ON_FREE_GPU = Path(__file__).parents[2] / "compose" / "on-free-gpu"
ECHO = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES"; read _']


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A machine with two GPUs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    smi.chmod(0o755)
    return {"PATH": f"{tmp_path}{os.pathsep}{os.defpath}", "GPU_LOCKS": str(tmp_path)}


def start(environment: dict[str, str]) -> "subprocess.Popen[str]":
    """A role that tells its GPU and runs until its stdin ends."""
    pipe = subprocess.PIPE
    return subprocess.Popen([str(ON_FREE_GPU), *ECHO], env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def gpu_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_each_role_gets_a_gpu_of_its_own_until_it_is_killed(environment: dict[str, str]) -> None:
    first, second = start(environment), start(environment)
    assert {gpu_of(first), gpu_of(second)} == {"0", "1"}
    third = start(environment)
    assert (third.communicate()[1].partition(": every GPU")[0], third.returncode) == ("on-free-gpu", 1)
    first.kill()
    first.communicate()
    fourth = start(environment)
    assert gpu_of(fourth) in ("0", "1")
    for process in (second, fourth):
        process.communicate("")
        assert process.returncode in (0, 1)


def test_the_exit_status_of_the_command_is_passed_on(environment: dict[str, str]) -> None:
    assert (
        subprocess.run([str(ON_FREE_GPU), "sh", "-c", "exit 7"], env=environment, capture_output=True).returncode == 7
    )
