"""A run's records on disk: a JSON line per train step (`metrics.jsonl`) and per buffer reading (`depth.jsonl`).

The trainer writes the former, and the live view of `rollq demo` writes the latter. Both can be read at any time: an
unfinished line is skipped, and the last line counts for a step that was trained again after a crash.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

METRICS_FILE = "metrics.jsonl"
DEPTH_FILE = "depth.jsonl"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One train step.

    `rewards` maps tasks to mean rewards, `staleness_tokens` maps staleness to numbers of trained tokens, and `workers`
    maps workers to their numbers of samples in the batch.
    """

    step: int
    time_s: float  # seconds since 1970, when the step was committed
    reward: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    staleness_tokens: Mapping[int, int] = field(default_factory=dict)
    wait_s: float = 0.0
    train_s: float = 0.0
    workers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BufferReading:
    """One reading of the buffer.

    `depths` maps task and status to a number of groups, `progress` maps task and counter to a value, and `workers` maps
    each worker to its last report. `version` is the live weights' version, -1 before the first.
    """

    time_s: float
    depths: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    progress: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    workers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    version: int = -1

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain values: one line of `depth.jsonl`."""
        return {
            "time_s": self.time_s,
            "depths": {task: dict(statuses) for task, statuses in self.depths.items()},
            "progress": {task: dict(counters) for task, counters in self.progress.items()},
            "workers": {name: dict(report) for name, report in self.workers.items()},
            "version": self.version,
        }


def read_steps(path: Path) -> list[StepRecord]:
    """Read the steps of a `metrics.jsonl` in order, each once; none if the file does not exist yet."""
    steps = {int(line["step"]): _step(line) for line in read_lines(path)}
    return [steps[step] for step in sorted(steps)]


def read_buffer_readings(path: Path) -> list[BufferReading]:
    """Read the buffer readings of a `depth.jsonl` in order."""
    return [BufferReading(**line) for line in read_lines(path)]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one JSON line."""
    with path.open("ab") as file:
        file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read a file's JSON objects, one per line, except for an unfinished last line; none without a file."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n") and line.strip():
            yield orjson.loads(line)


def _step(line: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=int(line["step"]),
        time_s=float(line["time_s"]),
        reward=float(line["reward"]),
        rewards={task: float(reward) for task, reward in line.get("rewards", {}).items()},
        tokens=int(line.get("tokens", 0)),
        staleness_tokens={int(age): int(tokens) for age, tokens in line.get("staleness_tokens", {}).items()},
        wait_s=float(line.get("wait_s", 0.0)),
        train_s=float(line.get("train_s", 0.0)),
        workers={worker: int(samples) for worker, samples in line.get("workers", {}).items()},
    )


def rewarded_tasks(steps: Iterable[StepRecord]) -> list[str]:
    """The names of the tasks that have rewards in a step, sorted."""
    return sorted({task for step in steps for task in step.rewards})
