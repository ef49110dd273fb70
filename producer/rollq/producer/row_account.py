"""Reports a producer's rows to the buffer, which shows how many are unusable, and why."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rollq.buffer.errors import InvalidPrompt, ServerError
from rollq.buffer.roles import ProducerBuffer
from rollq.producer.usable_rows import UsableRows


class RowAccount:
    """Reports the rows of one producer's tasks and evaluations."""

    def __init__(self, buffer: ProducerBuffer) -> None:
        self._buffer = buffer
        self._seen: dict[str, int] = {}

    @contextmanager
    def keeping(self, task: str, rows: UsableRows) -> Iterator[list[int]]:
        """Report the rows read within the block, before they become groups, even if too many are unusable.

        Yields a list for the cursor after them. If it stays empty, rows are read in the order of the file.
        """
        passed: list[int] = []
        try:
            yield passed
        except InvalidPrompt:
            with suppress(ServerError):
                self._report(task, rows, rows.seen)
            raise
        self._report(task, rows, passed[0] if passed else rows.seen)

    def _report(self, task: str, rows: UsableRows, passed: int) -> None:
        if rows.unreported or rows.seen > self._seen.get(task, 0):
            account = rows.source.account
            self._buffer.account_rows(task, account, rows=rows.count, passed=passed, unusable=rows.unreported)
            rows.unreported.clear()
            self._seen[task] = rows.seen
