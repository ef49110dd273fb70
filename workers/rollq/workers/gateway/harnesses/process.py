"""One harness's process: its folder, environment, output and end."""

import asyncio
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from rollq.buffer.common.child_processes import INHERITED, bare_python
from rollq.buffer.common.removing import remove_folder
from rollq.workers.engines.vllm import watchdog
from rollq.workers.gateway.harnesses import launcher
from rollq.workers.gateway.harnesses.enclosure import Enclosure
from rollq.workers.gateway.harnesses.links import is_below, remove_links

NEW_PREFIX: Final = ".new-"
OUTPUT: Final = "output.log"
TAIL_BYTES: Final = 2000
END_S: Final = 5.0
LOOK_S: Final = 0.01
MARKER: Final = "ROLLQ_SESSION_FOLDER"
"""The variable that identifies a harness's processes, including orphans."""


@dataclass(frozen=True, slots=True)
class HarnessFolder:
    """One session's folder. The command runs in `workspace`, its home. Other files are beside the workspace.

    The worker holds a `lock` on the folder, an open file. An unlocked folder was left by a killed worker.
    """

    root: Path
    lock: int | None = None

    @classmethod
    def make(cls, template: Path | None, name: str = "") -> "HarnessFolder":
        """Make a folder whose workspace is a copy of `template`, or empty. Raises `OSError`.

        The path contains `name`, so the next attempt at a sample gets the same path, which agents write into their
        requests. If a folder with this name is in use, the path differs.
        """
        new = Path(tempfile.mkdtemp(prefix=NEW_PREFIX, dir=sessions_folder()))  # renamed after it is locked
        lock = os.open(new, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        folder = cls(new, lock)
        folder.temporary.mkdir()
        try:
            folder = cls(_named(new, name), lock)
            if template is None:
                folder.workspace.mkdir()
            else:
                shutil.copytree(template, folder.workspace, symlinks=True)
        except BaseException:
            folder.remove()
            raise
        return folder

    @property
    def workspace(self) -> Path:
        return self.root / "workspace"

    @property
    def metadata(self) -> Path:
        return self.root / "metadata.json"

    @property
    def output(self) -> Path:
        return self.root / OUTPUT

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def prompt(self) -> Path:
        return self.root / "prompt"

    def environment(self, added: Mapping[str, str]) -> dict[str, str]:
        """The command's environment variables."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        own = {"HOME": str(self.workspace), "TMPDIR": str(self.temporary)}
        return {**inherited, **own, **added, MARKER: str(self.root)}

    def end_processes(self) -> None:
        """Kill the processes whose environment names this folder, until none are left. Needs a system that shows
        environments."""
        deadline_s = monotonic() + END_S
        while (pids := self._processes()) and monotonic() < deadline_s:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            sleep(LOOK_S)

    def _processes(self) -> list[int]:
        marker, pids = f"{MARKER}={self.root}".encode(), []
        for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
            with suppress(OSError):
                if marker in watchdog.environment(pid).split(b"\0"):
                    pids.append(pid)
        return pids

    def remove_foreign_links(self) -> int:
        """Remove links in the workspace that lead above it or to another session's folder, where a judge would read
        another command's work. Remove folders too deep to be read. Returns the number removed."""
        sessions, own = os.path.realpath(self.root.parent), str(self.workspace)

        def stays(target: str | None) -> bool:
            if target is None or is_below(target, own):
                return target is not None
            try:
                return not is_below(os.path.realpath(target), sessions)
            except RecursionError:  # a chain of links in a folder that commands may write to
                return False

        self.root.chmod(0o700)
        return remove_links(self.workspace, stays)

    def tail(self) -> str:
        """The end of the command's output; empty if the command has replaced the output file."""
        try:
            with open(os.open(self.output, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
                file.seek(max(0, self.output_bytes() - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    def output_bytes(self) -> int:
        """The number of bytes that the command has written."""
        try:
            return self.output.lstat().st_size
        except OSError:  # the command has removed it
            return 0

    def remove(self) -> None:
        """Remove everything."""
        remove_folder(self.root)
        if self.lock is not None:
            os.close(self.lock)


def _named(new: Path, name: str) -> Path:
    """Rename a new folder, which is not empty. Returns its path."""
    other = new.with_name(new.name.removeprefix(NEW_PREFIX))
    wanted = new.with_name(name or other.name)
    for _ in range(2 if name else 0):
        try:
            return new.rename(wanted)
        except OSError:  # the folder exists
            _remove_if_left(wanted)
    return new.rename(other)


def sessions_folder() -> Path:
    """Return the folder of this user's sessions, created if missing. Raises `OSError`, including for another user's
    folder."""
    folder = Path(tempfile.gettempdir()) / f"rollq-sessions-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not stat.S_ISDIR(folder.lstat().st_mode) or folder.lstat().st_uid != os.getuid():
        raise OSError(f"{folder} is not a folder of this user: remove it, or set TMPDIR to another place")
    return folder


def remove_left_folders() -> None:
    """Remove killed workers' folders, and end their harnesses' remaining processes."""
    for root in sessions_folder().glob("[!.]*"):
        _remove_if_left(root)


def _remove_if_left(root: Path) -> None:
    """Remove a folder whose worker was killed."""
    with suppress(OSError):
        lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        folder = HarnessFolder(root, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = os.path.samestat(os.fstat(lock), root.lstat())  # otherwise it is a new folder
        except OSError:  # its worker is alive
            is_left = False
        if not is_left:
            os.close(lock)
            return
        folder.end_processes()
        folder.remove()


class HarnessProcess:
    """A running command. The command and all its descendants end with the worker, even if the worker is killed."""

    def __init__(self, process: asyncio.subprocess.Process, folder: HarnessFolder) -> None:
        self._process = process
        self._folder = folder

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        folder: HarnessFolder,
        environment: Mapping[str, str],
        prompt: bytes,
        *,
        max_file_bytes: int,
        enclosure: Enclosure | None = None,
    ) -> "HarnessProcess":
        """Start a folder's command in its workspace, with the prompt on standard input. Each file that the command
        writes, including its output, has at most `max_file_bytes`. The command runs in the `enclosure`, if any."""
        enclosed = "" if enclosure is None else enclosure.as_text()
        with folder.prompt.open("xb") as file:
            file.write(prompt)
        with folder.prompt.open("rb") as stdin, folder.output.open("xb") as output:
            process = await asyncio.create_subprocess_exec(
                *bare_python(launcher.__name__, os.getpid(), folder.root, max_file_bytes, enclosed, *command),
                stdin=stdin,
                stdout=output,
                stderr=output,
                cwd=folder.workspace,
                env=folder.environment(environment),
                start_new_session=True,
            )
        return cls(process, folder)

    async def wait(self) -> int:
        """Wait until the command has ended. Returns its exit code, or 128 plus the signal that ended it."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def end(self) -> None:
        """End the command and its descendants if they are running."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), END_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
        if await self._process.wait() < 0:  # the launcher was killed before it had ended the others
            await asyncio.to_thread(self._folder.end_processes)
