"""Wake-ups from Redis: one thread listens for new weights, paused or resumed tasks, ending batches, and samples that
are offered or returned."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from rollq.buffer.errors import ServerError
from rollq.buffer.store.pubsub import EventKind
from rollq.workers.buffer_calls import BufferCalls
from rollq.workers.wake_signals import Signal, Signals

LISTEN_S = 0.25
"""The listening thread notices a request to end within this many seconds."""
LAST_LISTEN_S = 4 * LISTEN_S
"""How many seconds to wait for that thread at the end: it hangs while the server is unreachable."""


class Wakeups:
    """Sets the signals `weights` and `control`, or `batches`, `loans` or `offers`, when Redis announces a change."""

    def __init__(
        self, calls: BufferCalls, signals: Signals, others: Mapping[str, Callable[[Any], object]] | None = None
    ) -> None:
        """`others` maps the names of other channels to functions, which the listening thread calls for each message."""
        self._calls = calls
        self._signals = signals
        self._others = dict(others or {})

    async def run(self) -> None:
        """Listen until cancelled."""
        stop = threading.Event()
        loop = asyncio.get_running_loop()
        wake = partial(loop.call_soon_threadsafe, self._wake)
        signals = self._signals
        others = {EventKind.BATCH: signals.batches, EventKind.LEND: signals.offers, EventKind.RETURNED: signals.loans}
        for kind, signal in others.items():
            channel = self._calls.buffer.event_channel(kind)
            self._others[channel] = partial(_set, loop, signal)
        listening = asyncio.create_task(self._calls(self._listen, stop, wake))
        try:
            await asyncio.shield(listening)
        finally:
            stop.set()
            await asyncio.wait([listening], timeout=LAST_LISTEN_S)

    def _wake(self) -> None:
        self._signals.weights.set()
        self._signals.control.set()

    def _listen(self, stop: threading.Event, wake: Callable[[], object]) -> None:
        """Call `wake` at every wake-up until `stop`. Only this thread uses the subscription."""
        while not stop.is_set():
            try:
                with self._calls.buffer.events(EventKind.PUBLISH, EventKind.CONTROL, others=self._others) as events:
                    while not stop.is_set():
                        if events.wait(LISTEN_S):
                            wake()
            except (RedisError, ServerError, OSError):
                stop.wait(LISTEN_S)


def _set(loop: asyncio.AbstractEventLoop, signal: Signal, _: object) -> None:
    loop.call_soon_threadsafe(signal.set)
