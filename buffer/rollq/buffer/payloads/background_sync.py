"""Brings written files to disk within a second, as the server does with its append-only file (`appendfsync everysec`).

A power cut may lose files from the last second, just as it may lose the server's last second of writes. A process that
ends syncs its files first. A killed process loses nothing, but its files from the last second reach the disk only when
the operating system writes them.
"""

import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rollq.buffer.common.atomic_files import fsync_path
from rollq.buffer.common.log_once import LogOnce

SYNC_EVERY_S = 1.0

_log_once = LogOnce(logging.getLogger(__name__))


class BackgroundSync:
    """Syncs files below `root`, and the folders that name them, in a thread that starts with the first file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._files = set[str]()
        self._changed = threading.Condition()  # guards the files and the end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="payload-sync", daemon=True)

    def add(self, path: str) -> None:
        """Sync a written file soon, or at once after `close`."""
        if self._process != os.getpid():  # a fork has no thread, and nothing may free its lock
            self._begin()
        with self._changed:
            if not self._closed:
                is_first = not self._files
                self._files.add(path)
                if self._thread.ident is None:
                    self._thread.start()
                if is_first:  # the thread syncs the others with it
                    self._changed.notify()
                return
        self._sync({path})

    def close(self) -> None:
        """Sync the added files, and stop."""
        if self._process != os.getpid():  # its parent does
            return
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # if a finalizer ran in it
            self._thread.join()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._files or self._closed)
                files, self._files = self._files, set()
                is_over = self._closed
            began_s = time.monotonic()
            self._sync(files)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, max(0.0, SYNC_EVERY_S - time.monotonic() + began_s))

    def _sync(self, files: set[str]) -> None:
        """Sync files, then the folders with their names. Files removed since then need no sync."""
        paths = sorted(map(Path, files))
        for path in [*paths, *sorted(self._folders_of(paths), reverse=True)]:
            try:
                with suppress(FileNotFoundError):
                    fsync_path(path)
            except OSError as error:
                _log_once.warning(str(self._root), "%s: a payload may not be on disk: %s", path, error)

    def _folders_of(self, files: Iterable[Path]) -> set[Path]:
        """The folders that name the files, and all folders above them, which are new if a run was deleted."""
        return {folder for path in files for folder in path.parents if folder.is_relative_to(self._root)}
