"""The place of a run's process: its machine, its process id there, and the GPUs that it may use."""

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

MOST_CHARACTERS = 80
_NO_GPU = ("", "-1", "none", "void", "NoDevFiles")
_PID = re.compile("[0-9]{1,19}")


@dataclass(frozen=True, slots=True)
class Place:
    """A process on a machine. `gpus` lists the GPUs that it may use, as `gpus_here` returns them."""

    host: str
    pid: int
    gpus: str = ""

    @classmethod
    def here(cls) -> Self:
        """This process's place."""
        return cls(socket.gethostname(), os.getpid(), gpus_here())

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self | None:
        """The place that a report names; None if the report names no place."""
        host, pid, gpus = fields.get("host"), str(fields.get("pid") or ""), fields.get("gpus") or ""
        if not (isinstance(host, str) and host and _PID.fullmatch(pid)):
            return None
        return cls(host[:MOST_CHARACTERS], int(pid), str(gpus)[:MOST_CHARACTERS])

    def __str__(self) -> str:
        return f"{self.host}, process {self.pid}"


def gpus_here(devices: Path = Path("/dev")) -> str:
    """The GPUs that this process may use: `0,1`, with their name if the process already uses CUDA; empty without any.

    Never starts CUDA.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        numbers = [file.name.removeprefix("nvidia") for file in devices.glob("nvidia[0-9]*")]
        visible = ",".join(map(str, sorted(int(number) for number in numbers if number.isdecimal())))
    if visible.strip() in _NO_GPU:
        return ""
    return (visible + _names())[:MOST_CHARACTERS]


def _names() -> str:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return ""
    try:
        names = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    except RuntimeError:  # for a GPU that has failed; other parts report it
        return ""
    return f" ({', '.join(sorted(names))})"
