"""Ctrl-C for a command that has children to stop: heard once, and over within a bound."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

EXIT_WITHIN_S = 4.5
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interrupt_once() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt and ignore the next ones, so that nothing cuts
    the shutdown short. A shutdown that takes longer than `EXIT_WITHIN_S` ends with the process."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_WITHIN_S)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
