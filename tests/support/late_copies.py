"""Copies of calls that arrive late: the network delivers a call a second time, after its caller has moved on."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import RollqError
from rollq.buffer.store.library import READ_ONLY
from rollq.buffer.store.pipelining import Command

AT_ANY_TIME = {
    "expire", "reap", "recycle",  # do what is due now, whoever asks
    "take_production", "report_worker", "append_round",  # for people, or for a broadcast that is over
    "store_weights",  # by content: in the store once, and never instead of the live ones
}  # fmt: skip
"""Functions whose copies do what any other role might do at that moment, or change nothing that a run depends on."""


class RecordingBuffer(Buffer):
    """Records every call that may write, in `recorded`, and makes copies of them arrive."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recorded: list[Command] = []

    def call(self, name: str, key: str, *args: Any) -> Any:
        self._record([(name, key, *args)])
        return super().call(name, key, *args)

    def call_each(self, calls: Callable[[], Iterable[Command]]) -> list[Any]:
        made = list(calls())
        self._record(made)
        return super().call_each(lambda: made)

    def arrive_again(self, copy: Command) -> None:
        """Let a copy of a call arrive. Nobody waits for its reply."""
        with suppress(RollqError):
            super().call(*copy)

    def _record(self, calls: Iterable[Command]) -> None:
        self.recorded += [call for call in calls if call[0] not in READ_ONLY]
