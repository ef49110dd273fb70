"""How a command ends on a signal: a role is asked to stop, a command with children shuts them down within a bound."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_WITHIN_S = 4.5
AGAIN_AFTER_S = 0.01
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets. The next signal does what it does by default."""
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        signal.signal(number, ask)
    return stop


@contextlib.contextmanager
def interrupt_once() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt and ignore the next ones, so that nothing cuts
    the shutdown short. A shutdown that takes longer than `EXIT_WITHIN_S` ends with the process.

    Python drops what is raised in a `__del__` or a weak reference's callback, where a signal may come as anywhere
    else. It tells `sys.unraisablehook`, and so the interrupt is raised once more, a moment later.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_WITHIN_S)
        raise KeyboardInterrupt

    def dropped(told: Any) -> None:
        if not issubclass(told.exc_type, KeyboardInterrupt):
            hook(told)
            return
        signal.signal(signal.SIGINT, interrupt)
        threading.Timer(AGAIN_AFTER_S, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
