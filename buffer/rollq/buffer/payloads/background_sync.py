"""Brings written files to disk within a second, as the server does with its append-only file (`appendfsync everysec`).

A power cut may lose the files of the last second, as it may lose the server's last second of writes. A killed process
loses nothing.
"""

import logging
import threading
import time
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
        self._files = set[Path]()
        self._named = {root}  # folders whose own names are on disk
        self._changed = threading.Condition()  # guards the files and the end
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="payload-sync", daemon=True)

    def add(self, path: Path) -> None:
        """Sync a file that was written."""
        with self._changed:
            if self._closed:
                return
            self._files.add(path)
            if self._thread.ident is None:
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Sync what was added, and stop."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
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

    def _sync(self, files: set[Path]) -> None:
        """Sync files, then the folders with their names. A file that was removed since needs no sync."""
        for path in [*sorted(files), *self._folders_of(files)]:
            try:
                with suppress(FileNotFoundError):
                    fsync_path(path)
            except OSError as error:
                _log_once.warning(str(self._root), "%s: a payload may not be on disk: %s", path, error)

    def _folders_of(self, files: set[Path]) -> list[Path]:
        """The folders that name the files, and the folders above them that name a new folder."""
        folders = {path.parent: None for path in files}
        for folder in list(folders):
            while folder not in self._named:
                self._named.add(folder)
                folder = folder.parent
                folders[folder] = None
        return list(folders)
