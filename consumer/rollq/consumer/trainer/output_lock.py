"""A lock on a trainer's output folder: only one trainer at a time writes checkpoints, weights and metrics into it.

The operating system holds it for the process, and releases it when the process ends or is killed.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollq.buffer.errors import ConfigError

log = logging.getLogger(__name__)

LOCK_FILE = "trainer.lock"


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Create the folder if needed, and hold its lock inside the `with` block.

    Logs a warning if the file system has no locks. Raises `ConfigError` for a folder that cannot be written, or that
    another process has locked.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"[trainer] output: {str(output)!r} cannot be created: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"[trainer] output: {str(output)!r} is in use by another trainer ({file.read().strip() or 'unknown'}): "
                "stop it, or name another folder"
            ) from None
        except OSError as error:
            log.warning("[trainer] output: %r cannot be locked, keep other trainers out of it: %s", str(output), error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
