"""A thread for work that may hang. Pages wait for it only briefly."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["WAIT_S", "NotYet", "OwnThread"]

WAIT_S = 2.0
"""How long a page waits for the archive, in seconds."""
T = TypeVar("T")


class OwnThread:
    """Runs calls one after another in one thread."""

    def __init__(self, name: str, wait_s: float) -> None:
        self.wait_s = wait_s
        self._asked: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        # a daemon thread: a hanging archive does not keep the process alive
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, do: Callable[[], T]) -> T:
        """Return the result of `do`, or raise its exception.

        Raises `NotYet` after `wait_s`. A call that has not started by then is dropped.
        """
        answer: Future[T] = Future()
        self._asked.put((do, answer))
        try:
            return answer.result(self.wait_s)
        except NotYet:
            answer.cancel()
            raise

    def _work(self) -> None:
        while True:
            do, answer = self._asked.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(do())
            except BaseException as error:  # noqa: BLE001 - it is raised in the caller's thread
                answer.set_exception(error)
