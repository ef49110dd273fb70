"""An engine's speed as a function of its number of sequences, estimated from answered requests.

A decoding step of n sequences takes a + b n seconds: a for reading the weights once, and b for each sequence. Both are
fitted to request durations (least squares, weighted by tokens), so two equal machines count as equally fast even if one
has less work.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MEMORY_TOKENS = 250_000
"""The weight of a token falls to 1/e after this many later tokens."""
LEAST_TOKENS = 1_000
"""The speed is unknown until this many tokens have been seen."""
FARTHEST = 2.0
"""The speed is unknown beyond this many times the largest number of sequences seen."""
LEAST_SPREAD = 0.1
"""Numbers of sequences with a smaller spread cannot determine b."""


@dataclass(slots=True)
class EngineSpeed:
    """Weighted sums, over tokens, of n (sequences in the engine) and t (seconds for one sequence's token)."""

    tokens: float = 0.0
    n: float = 0.0
    t: float = 0.0
    nn: float = 0.0
    nt: float = 0.0
    most: float = 0.0
    seen: int = 0

    def note(self, tokens: int, seconds: float, sequences: float) -> None:
        """Add a request whose `tokens` took `seconds` while `sequences` ran on average, including itself."""
        if tokens <= 0 or seconds <= 0:
            return
        fade = max(0.0, 1 - tokens / MEMORY_TOKENS)
        n, t = max(1.0, sequences), seconds / tokens
        self.tokens = fade * self.tokens + tokens
        self.n = fade * self.n + tokens * n
        self.t = fade * self.t + tokens * t
        self.nn = fade * self.nn + tokens * n * n
        self.nt = fade * self.nt + tokens * n * t
        self.most = max(fade * self.most, n)
        self.seen += tokens

    @property
    def mean_sequences(self) -> float:
        """The mean number of running sequences per token; 0.0 before the first token."""
        return self.n / self.tokens if self.tokens else 0.0

    def tokens_per_s(self, sequences: float) -> float:
        """The tokens per second that this number of sequences generates in total; 0.0 while unknown."""
        if self.seen < LEAST_TOKENS or not 0 < sequences <= FARTHEST * self.most:
            return 0.0
        n, t = self.n / self.tokens, self.t / self.tokens
        b = self._slope(surely=0.0)
        return sequences / (t - b * n + b * sequences)

    def gain(self, sequences: float) -> float:
        """By how many percent one percent more sequences speed the engine up: from 1 for an engine that mostly reads
        weights to 0 for a fully used engine. 1.0 while unknown.

        It is a / (a + b n), the elasticity of n / (a + b n).
        """
        if self.seen < LEAST_TOKENS:
            return 1.0
        n, t = self.n / self.tokens, self.t / self.tokens
        b = self._slope(surely=t / n)
        step_s = t - b * n + b * sequences
        return 1 - b * sequences / step_s if step_s > 0 else 1.0

    def described(self, places: int) -> dict[str, float] | None:
        """a and b in seconds, and the largest number of sequences for which they hold, at most `places`; None while
        unknown.

        If the observations cannot separate a from b, a is 0, and the total speed is the observed one.
        """
        if self.seen < LEAST_TOKENS:
            return None
        n, t = self.n / self.tokens, self.t / self.tokens
        b = self._slope(surely=t / n)
        sequences = min(places, max(1, round(self.most)))
        return {"step_s": float(f"{t - b * n:.4g}"), "sample_step_s": float(f"{b:.4g}"), "places": sequences}

    def _slope(self, surely: float) -> float:
        """b, or `surely` if all observations were at the same number of sequences."""
        n, t = self.n / self.tokens, self.t / self.tokens
        spread, nothing = self.nn / self.tokens - n * n, (LEAST_SPREAD * n) ** 2
        b = (self.nt / self.tokens - n * t + nothing * surely) / (spread + nothing)
        return min(max(b, 0.0), t / n)  # keeps a from being negative


class RequestClock:
    """Times requests, and counts the requests that run at the same time."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        """`now_s` is a steady clock."""
        self.speed = EngineSpeed()
        self._now_s = now_s
        self._running = 0
        self._area_s = 0.0
        """The seconds so far, each counted once per request running then."""
        self._at_s = now_s()

    @contextmanager
    def request(self) -> "Iterator[Callable[[int], None]]":
        """Time one request. Yields a function to call with the number of its tokens."""
        began_s, began_area_s = self._change(+1)
        tokens = 0

        def got(count: int) -> None:
            nonlocal tokens
            tokens = count

        try:
            yield got
        finally:
            ended_s, ended_area_s = self._change(-1)
            seconds = ended_s - began_s
            if seconds > 0:
                self.speed.note(tokens, seconds, (ended_area_s - began_area_s) / seconds)

    def _change(self, by: int) -> tuple[float, float]:
        now_s = self._now_s()
        self._area_s += self._running * (now_s - self._at_s)
        self._at_s = now_s
        self._running += by
        return now_s, self._area_s
