"""Clean stops: the first SIGTERM or SIGINT asks a role to end, the second ends it at once."""

import signal
import threading
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def stop_on_signals() -> threading.Event:
    """An event that the first signal sets. The next signal does what it does by default."""
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        signal.signal(number, ask)
    return stop
