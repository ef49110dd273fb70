"""Runs `[monitor] on_change` while a command of rollq watches a run."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rollq.buffer.errors import RollqError
from rollq.monitor.changes.change import Look
from rollq.monitor.changes.command import Command
from rollq.monitor.changes.settings import MonitorSettings
from rollq.monitor.changes.watcher import ChangeWatcher
from rollq.monitor.status.read import RunStatus

log = logging.getLogger(__name__)


@contextmanager
def on_change(
    settings: MonitorSettings,
    run: str,
    folder: Path,
    *,
    read: Callable[[], RunStatus],
    replace: Callable[[str, bool], str | None],
    output: Path | None = None,
    last_look: bool = False,
    on_failure: Callable[[str], object] = log.warning,
) -> Iterator[ChangeWatcher | None]:
    """Within the `with` block, watch the run, and call the command in `folder` when the run's state changes. Yields
    None without a command. One thread at a time calls `read` and `replace`. `ChangeWatcher` describes the arguments.

    The command's output goes to the file `output`, or to standard error. Raises `ConfigError` for a missing program.
    """
    if not settings.on_change:
        yield None
        return
    command = Command(settings.on_change, folder, output)
    command.check()

    def look() -> Look:
        try:
            return Look.at(read(), "")
        except RollqError as error:
            return Look.at(None, str(error))

    with ChangeWatcher(
        run, look, command, after_s=settings.on_change_after_s, replace=replace, last_look=last_look,
        on_failure=on_failure,
    ) as watcher:  # fmt: skip
        yield watcher
