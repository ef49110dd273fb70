"""The trainer's current activity, for monitors: its phase, the start of the phase, and the groups that a waiting
trainer lacks."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median_low
from typing import Any

from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.values.trainer_state import TrainerPhase

AVERAGED_STEPS = 10
"""How many steps the averages cover."""


class Activity:
    """The trainer's phase. One thread changes it, and another reads `words` at any time."""

    def __init__(self, step: int, now: Callable[[], float] = time.monotonic) -> None:
        """`step` is trained next; `now` is a steady clock in seconds."""
        self._now = now
        self._phase, self._step, self._since_s = TrainerPhase.STARTING, step, now()
        self._shortfall = Shortfall(step, {}, {})
        self._batch_s: float | None = None  # when the last batch or part arrived
        self._busy_with = self._waited_for = 0  # the steps of the last times below; parts of one batch add up
        self._busy_s: deque[float] = deque(maxlen=AVERAGED_STEPS)
        self._waited_s: deque[float] = deque(maxlen=AVERAGED_STEPS)
        self._committed_s: float | None = None
        self._rewards: Mapping[str, float] = {}
        self._response_tokens: Mapping[str, float] = {}
        self._error = ""

    def wait(self, step: int) -> None:
        """Note that the trainer asks for the batch of `step`."""
        if self._batch_s is not None:
            _add(self._busy_s, self._now() - self._batch_s, is_new=self._busy_with != self._waited_for)
            self._busy_with, self._batch_s = self._waited_for, None
        self._shortfall = Shortfall(step, {}, {})
        self._become(TrainerPhase.WAITING, step)

    def lack(self, shortfall: Shortfall) -> None:
        """Note that the batch lacks groups."""
        self._shortfall = shortfall

    def train(self, step: int) -> None:
        """Note that the trainer has all or part of the batch of `step`."""
        _add(self._waited_s, self._now() - self._since_s, is_new=self._waited_for != step)
        self._waited_for = step
        self._become(TrainerPhase.TRAINING, step)
        self._batch_s = self._since_s

    def commit(self, step: int, rewards: Mapping[str, float], response_tokens: Mapping[str, float]) -> None:
        """Note that the trainer has trained `step`, with these means over each task's samples."""
        self._rewards, self._response_tokens = rewards, response_tokens
        self._become(TrainerPhase.COMMITTED, step)
        self._committed_s = self._since_s

    def end(self, error: BaseException | None, *, stopped: bool) -> None:
        """Note how the trainer ended: with an error, on request, or at its last step."""
        if isinstance(error, KeyboardInterrupt | SystemExit) or (stopped and error is None):
            self._become(TrainerPhase.STOPPED, self._step)
        elif error is None:
            self._become(TrainerPhase.FINISHED, self._step)
        else:
            self._error = f"{type(error).__name__}: {error}"
            self._become(TrainerPhase.FAILED, self._step)

    @contextmanager
    def during(self, phase: TrainerPhase) -> Iterator[None]:
        """Enter a phase within another phase, which continues afterwards."""
        before, since_s = self._phase, self._since_s
        self._become(phase, self._step)
        try:
            yield
        finally:
            self._phase, self._since_s = before, since_s

    def words(self) -> Mapping[str, Any]:
        """The phase as plain values, for `TrainerState`."""
        said: dict[str, Any] = {"phase": self._phase.value, "step": self._step, "for_s": self._now() - self._since_s}
        if self._phase is TrainerPhase.WAITING:
            lack = self._shortfall
            names = ("ready", "wanted", "stragglers", "unarchived")
            said |= {name: dict(getattr(lack, name)) for name in names}
        if self._busy_s:
            said["busy_s"] = _mean(self._busy_s)
        if self._waited_s:
            said["waited_s"] = _mean(self._waited_s)
            said["usual_wait_s"] = median_low(tuple(self._waited_s))
        if self._committed_s is not None:
            said["last_step_s"] = self._now() - self._committed_s
            said |= {"rewards": dict(self._rewards), "response_tokens": dict(self._response_tokens)}
        return {**said, "error": self._error}

    def _become(self, phase: TrainerPhase, step: int) -> None:
        self._phase, self._step, self._since_s = phase, step, self._now()


def _add(times_s: deque[float], time_s: float, *, is_new: bool) -> None:
    if is_new or not times_s:
        times_s.append(time_s)
    else:
        times_s[-1] += time_s


def _mean(values: deque[float]) -> float:
    copied = tuple(values)
    return sum(copied) / len(copied)
