"""Waiting for what other processes and threads do."""

import subprocess
import time
from collections.abc import Callable, Mapping

PATIENCE_S = 600
"""Only a test that hangs waits this long, also on a slow machine."""


def wait_until(happened: Callable[[], bool], *, otherwise: Callable[[], object] = str) -> None:
    """Wait until `happened` returns True. If it never does, the failure shows what `otherwise` returns."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s, f"it did not happen within {PATIENCE_S} s: {otherwise()}"
        time.sleep(0.05)


def wait_while_alive(
    happened: Callable[[], bool], processes: "Mapping[str, subprocess.Popen[bytes]]", output: Callable[[str], str]
) -> None:
    """Wait until `happened` returns True, while none of `processes` ends. `output` is the text that a process has
    printed."""

    def happened_meanwhile() -> bool:
        for name, process in processes.items():
            assert process.poll() is None, f"{name} ended: {output(name)}"
        return happened()

    wait_until(happened_meanwhile, otherwise=lambda: {name: output(name)[-2000:] for name in processes})
