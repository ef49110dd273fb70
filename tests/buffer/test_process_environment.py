"""The environment of a process: others no longer see it, and the process and its children still have it."""

import os
import subprocess
import sys

import pytest

SHOWN = """
import os, subprocess, sys
from rollq.buffer.common.process_environment import hide_environment
hide_environment({"PATH"})
with open("/proc/self/environ", "rb") as file:
    seen = file.read()
assert b"hush" not in seen, seen
assert b"PATH=" in seen
assert os.environ["ROLLQ_GATEWAY_KEY"] == "hush", os.environ
assert subprocess.check_output(["sh", "-c", "echo $ROLLQ_GATEWAY_KEY"]) == b"hush\\n"
os.environ["ROLLQ_GATEWAY_KEY"] = "other"
hide_environment({"PATH"})
assert subprocess.check_output(["sh", "-c", "echo $ROLLQ_GATEWAY_KEY"]) == b"other\\n"
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, an environment is not shown so")
def test_secrets_of_the_environment_are_not_shown_to_other_processes() -> None:
    subprocess.run([sys.executable, "-c", SHOWN], check=True, env={**os.environ, "ROLLQ_GATEWAY_KEY": "hush"})
