"""The engine and the judge of workers that take part in a scaling benchmark: code that runs inside `rollq work`.

The engine is rollq's simulated engine, with two additions. The length of an answer depends on its group and on its
index: siblings differ, lengths are known beforehand, and a sample that is generated again is as long as before. The
engine also writes a record of running sequences to a file, line by line, since a worker may be killed. Both sides of a
comparison have this tree's engine, even if they load the rest of rollq from another tree.
"""

import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from benchmarks.world import TASK
from rollq.producer.prompt_order import Shuffle
from rollq.workers.seeds import sample_seed, turn_seed

if TYPE_CHECKING:
    from rollq.workers.engines.protocol import Completion, Request
    from rollq.workers.engines.shared_speed import Running

RUN_SEED = 0
GROUP_SIZE = 8
MAX_SAMPLES = 32_000
MAX_ATTEMPTS = 50
ENGINES = Path(__file__).parents[1] / "workers" / "rollq" / "workers" / "engines"


def _load(name: str) -> Any:
    """A module of this tree's engines, even if the rest of rollq is from another tree."""
    full = f"rollq.workers.engines.{name}"
    if Path(import_module("rollq.workers.engines").__path__[0]) == ENGINES:
        return import_module(full)
    spec = spec_from_file_location(full, ENGINES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[full] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


class KnownPrompts(Shuffle):
    """The usual order, as a custom one: rollq keeps statistics of the prompts for it."""

    def __init__(self, task: object) -> None:
        """A custom order gets the task's settings."""


if TYPE_CHECKING:
    from rollq.workers.engines import shared_speed, simulated
else:
    shared_speed, simulated = _load("shared_speed"), _load("simulated")


class _RecordedSpeed(shared_speed.SharedSpeed):
    """A `SharedSpeed` that writes the number of running sequences with the time, whenever it changes."""

    def __init__(self, tokens_per_s: float, most_tokens_per_s: float | None, file: TextIO) -> None:
        super().__init__(tokens_per_s, most_tokens_per_s)
        self._file = file
        file.write(f"{time.monotonic()} running 0\n")

    def start(self, tokens: int) -> "Running":
        sequence = super().start(tokens)
        self._write(self._at_s)
        return sequence

    def _end(self, sequence: "Running", clock: float) -> None:
        before = self.running
        super()._end(sequence, clock)
        if self.running != before:
            self._write(self._at_s)

    def _write(self, at_s: float) -> None:
        self._file.write(f"{at_s} running {self.running}\n")


class SampleNumbers:
    """Finds the group and the index of a sample by its seed."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._known: dict[int, tuple[int, int]] = {}
        self._attempts = 0

    def of(self, seed: int, made_tokens: int = 0) -> tuple[int, int]:
        """The id of the group, and the index of the sample in it. A sample that is continued after `made_tokens` tokens
        has another seed."""
        while not self._is_known(seed, made_tokens) and self._attempts < MAX_ATTEMPTS:
            self._attempts += 1
            for group_id in range(1, MAX_SAMPLES // self._group_size + 1):
                for index in range(self._group_size):
                    self._known[sample_seed(RUN_SEED, TASK, group_id, index, self._attempts)] = group_id, index
        return self._known[seed]

    def _is_known(self, seed: int, made_tokens: int) -> bool:
        """Whether the seed is found. Groups of low numbers, which come first, take the least time."""
        if seed not in self._known and made_tokens:
            samples = (sample for first, sample in self._known.items() if turn_seed(first, made_tokens) == seed)
            if (sample := next(samples, None)) is not None:
                self._known[seed] = sample
        return seed in self._known


class SaturatingEngine(simulated.SimulatedEngine):
    """A `SimulatedEngine` with lengths by sample, which records its work in the file `record`."""

    def __init__(self, record: str, group_size: int = GROUP_SIZE, by_row: bool = False, **options: Any) -> None:
        """With `by_row`, the row of the prompt decides the length of all its answers."""
        settings = simulated.SimulatedSettings(**options)
        super().__init__(settings)
        self._record = Path(record).open("a", buffering=1)  # noqa: SIM115 - until the process ends
        self._speed = _RecordedSpeed(settings.tokens_per_s, settings.most_tokens_per_s, self._record)
        self._numbers = SampleNumbers(group_size)
        self._by_row = by_row

    async def generate(self, request: "Request") -> "Completion":
        """Like `SimulatedEngine.generate`, but records the group and the index."""
        group_id, index = self._sample_of(request)
        self._record.write(f"{time.monotonic()} asked {group_id}/{index}\n")
        return await super().generate(request)

    def _length_of(self, request: "Request") -> int:
        if self._by_row:
            return sample_length(row_of(request.prompt_ids.tolist()), 0, self._settings.lengths)
        return sample_length(*self._sample_of(request), self._settings.lengths)

    def _sample_of(self, request: "Request") -> tuple[int, int]:
        assert request.sampling.seed is not None
        return self._numbers.of(request.sampling.seed, 0 if request.prefix_ids is None else len(request.prefix_ids))


def prompt_ids(row: int) -> list[int]:
    """The tokens of the prompt of a row."""
    return [row // 1000, row % 1000]


def row_of(ids: Sequence[int]) -> int:
    """The row of the prompt with these tokens."""
    return int(ids[0]) * 1000 + int(ids[1])


def sample_length(group_id: int, index: int, lengths: Sequence[int]) -> int:
    """The element of `lengths` that a sample draws."""
    return int(simulated.length_of(np.array([group_id, index], np.int32), lengths))


def judge(prompt: object, sample: object) -> float:
    """Give every sample the same reward: nothing is learned here."""
    return 0.0
