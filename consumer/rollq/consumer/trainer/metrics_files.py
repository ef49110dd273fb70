"""The trainer's metrics on disk: a JSON line per step, and one per evaluation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.common.atomic_files import atomic_file

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


def append(output: Path, name: str, line: Mapping[str, Any]) -> None:
    """Append a line to the file `name` in a trainer's output folder."""
    with (output / name).open("ab") as file:
        file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def cut(output: Path, last_step: int) -> None:
    """Remove the lines of steps after `last_step`, which will be trained again, and a line that a crash cut short."""
    for path in (output / METRICS_FILE, output / EVALUATIONS_FILE):
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n") and orjson.loads(line)["step"] <= last_step]
        if len(whole) < len(lines):
            atomic_file(path, b"".join(whole))
