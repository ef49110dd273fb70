"""Ends a command on a signal: a role is asked to stop, and a command with children shuts them down in bounded time."""

import _thread
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
EXIT_WITHIN_S = 4.5
"""The longest default shutdown after an interrupt, in seconds."""
AGAIN_AFTER_S = 0.01
"""Seconds after which an interrupt that Python dropped is raised again."""
INTERRUPT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets. A second signal has its default effect.

    A thread sets the event: the handler runs in the main thread, which may hold the event's lock while waiting for the
    event.
    """
    stop = threading.Event()

    def ask(_number: int, _frame: FrameType | None) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _thread.start_new_thread(stop.set, ())

    for number in STOP_SIGNALS:
        signal.signal(number, ask)
    return stop


@contextlib.contextmanager
def forward_signals(processes: "Sequence[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Pass the first SIGTERM or SIGINT on to the processes, instead of ending. The second signal kills them: a process
    that is stuck in a library would never handle it.
    """
    seen = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        for process in processes:
            if process.returncode is None:
                os.kill(process.pid, number if seen == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _let_it_end(within_s: float, later: signal.Handlers) -> None:
    """Kill this process after `within_s`, and let `later` handle the signals until then."""
    for number in INTERRUPT_SIGNALS:
        signal.signal(number, later)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, within_s)


@contextlib.contextmanager
def interrupt_once(within_s: float = EXIT_WITHIN_S, *, again_kills: bool = False) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt, and ignore later signals, so that nothing cuts
    the shutdown short; with `again_kills`, the next signal kills this process. A shutdown that takes longer than
    `within_s` is killed too.

    A signal may arrive inside a `__del__` or a weak reference's callback, where Python drops exceptions and reports
    them to `sys.unraisablehook`. In that case, the interrupt is raised again, a moment later, until Python delivers it:
    a signal that arrives just before a system call blocks does not end that call.
    """
    repeating = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal repeating
        if _runs(frame, dropped):  # where Python would drop it, too
            repeat()
            return
        repeating = False
        _let_it_end(within_s, signal.SIG_DFL if again_kills else signal.SIG_IGN)
        raise KeyboardInterrupt

    def dropped(unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            hook(unraisable)
            return
        signal.signal(signal.SIGINT, interrupt)
        repeat()

    def repeat() -> None:
        nonlocal repeating
        if not repeating:
            repeating = True
            _thread.start_new_thread(send_until_raised, ())

    def send_until_raised() -> None:
        time.sleep(AGAIN_AFTER_S)
        while repeating:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(AGAIN_AFTER_S)

    before = {number: signal.signal(number, interrupt) for number in INTERRUPT_SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, dropped
    try:
        yield
    finally:
        repeating = False
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _runs(frame: FrameType | None, function: Callable[..., None]) -> bool:
    """Whether a frame belongs to a function, or whether the function called it."""
    while frame is not None:
        if frame.f_code is function.__code__:
            return True
        frame = frame.f_back
    return False
