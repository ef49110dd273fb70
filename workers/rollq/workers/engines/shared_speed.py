"""The timing of sequences that share a speed limit, as on a GPU under load.

Invariant: between a start and an end, all running sequences make tokens at the same pace. One clock, which counts the
tokens per sequence, serves all sequences: a sequence ends when the clock has moved by its length. The cost of an event
is logarithmic in the number of running sequences. A single timer waits for the next mark. A mark counts as reached at
its due time, even if the event loop is late.
"""

import asyncio
import heapq
from dataclasses import dataclass
from itertools import count

EARLY_S = 1e-6
"""How much too early, in seconds, a timer can fire."""


def pace_of(sequences: int, tokens_per_s: float, most_tokens_per_s: float | None) -> float:
    """The tokens per second that each of `sequences` sequences makes: `tokens_per_s`, or an equal share of
    `most_tokens_per_s` if the share is less.

    >>> pace_of(2, 50.0, 200.0), pace_of(8, 50.0, 200.0), pace_of(8, 50.0, None)
    (50.0, 25.0, 50.0)
    """
    if most_tokens_per_s is None:
        return tokens_per_s
    return min(tokens_per_s, most_tokens_per_s / max(sequences, 1))


@dataclass(slots=True, eq=False)
class Running:
    """A sequence. `first` and `last` are the clock's values at its start and end; `last` is None until it ends."""

    first: float
    last: float | None = None


@dataclass(slots=True, eq=False)
class _Mark:
    """A number of tokens that a sequence will reach. `ends` is true if the sequence ends there."""

    sequence: Running
    ends: bool
    reached: "asyncio.Future[None]"


class SharedSpeed:
    """The running sequences, and their clock. Call all methods on the event loop."""

    def __init__(self, tokens_per_s: float, most_tokens_per_s: float | None) -> None:
        self.running = 0
        self._speeds = tokens_per_s, most_tokens_per_s
        self._clock = 0.0  # tokens that each sequence has made at `_at_s`
        self._at_s = 0.0
        self._order = count()
        self._marks: list[tuple[float, bool, int, _Mark]] = []
        self._timer: asyncio.TimerHandle | None = None

    def start(self, tokens: int) -> Running:
        """Start a sequence of `tokens` tokens. Call `stop` to end it earlier."""
        self._advance()
        self.running += 1
        sequence = Running(self._clock)
        self._mark(sequence, tokens, ends=True)
        return sequence

    def reach(self, sequence: Running, tokens: int) -> "asyncio.Future[None]":
        """A future that is done when a sequence has made `tokens` tokens or has ended."""
        reached = self._mark(sequence, tokens, ends=False)
        if sequence.last is not None:
            reached.set_result(None)
        return reached

    def stop(self, sequence: Running) -> None:
        """End a sequence now. No effect on a sequence that has ended."""
        self._advance()
        self._end(sequence, self._clock)
        self._set_timer()

    def made(self, sequence: Running) -> float:
        """The number of tokens that a sequence has made so far."""
        self._advance()
        return (self._clock if sequence.last is None else sequence.last) - sequence.first

    def _mark(self, sequence: Running, tokens: int, *, ends: bool) -> "asyncio.Future[None]":
        mark = _Mark(sequence, ends, asyncio.get_running_loop().create_future())
        # Among marks at the same token, the end comes last.
        heapq.heappush(self._marks, (sequence.first + tokens, ends, next(self._order), mark))
        self._set_timer()
        return mark.reached

    def _end(self, sequence: Running, clock: float) -> None:
        if sequence.last is None:
            sequence.last = clock
            self.running -= 1

    def _advance(self) -> None:
        """Move the clock to the present, mark by mark, since each end makes the other sequences faster."""
        now_s = asyncio.get_running_loop().time()
        while (due_s := self._next_s()) is not None and due_s <= now_s + EARLY_S:
            at, _, _, mark = heapq.heappop(self._marks)
            self._clock, self._at_s = max(at, self._clock), due_s
            if mark.ends:
                self._end(mark.sequence, self._clock)
            mark.reached.set_result(None)
        if self.running:
            self._clock += max(0.0, now_s - self._at_s) * pace_of(self.running, *self._speeds)
        self._at_s = max(now_s, self._at_s)

    def _next_s(self) -> float | None:
        """When the next mark will be reached at the current pace; None without a mark. Drops marks of stopped
        sequences."""
        if len(self._marks) > 100 and len(self._marks) > 4 * self.running:
            self._marks = list(filter(_waits, self._marks))
            heapq.heapify(self._marks)
        while self._marks and not _waits(self._marks[0]):
            heapq.heappop(self._marks)
        if not self._marks:
            return None
        return self._at_s + max(0.0, self._marks[0][0] - self._clock) / pace_of(self.running, *self._speeds)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (due_s := self._next_s()) is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._on_time)

    def _on_time(self) -> None:
        self._advance()
        self._set_timer()


def _waits(entry: tuple[float, bool, int, _Mark]) -> bool:
    mark = entry[-1]
    return mark.sequence.last is None and not mark.reached.done()
