"""The process of one harness: its folder, its environment, its output, its end."""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollq.workers.gateway import launcher

INHERITED: Final = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR", "LD_LIBRARY_PATH")
"""Variables of the worker that a harness gets; none of them is a secret of rollq's."""
OUTPUT: Final = "output.log"
TAIL_BYTES: Final = 2000
END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class HarnessFolder:
    """The folder of one session: `workspace`, where the command runs, is also its home; the rest is beside it."""

    root: Path

    @classmethod
    def make(cls, template: Path | None) -> "HarnessFolder":
        """A new folder, whose workspace is a copy of `template`, or empty. Raises `OSError`."""
        folder = cls(Path(tempfile.mkdtemp(prefix="rollq-session-")))
        try:
            (folder.root / "tmp").mkdir()
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
    def output(self) -> Path:
        return self.root / OUTPUT

    def environment(self, added: Mapping[str, str]) -> dict[str, str]:
        """The variables of the command."""
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        return {**inherited, "HOME": str(self.workspace), "TMPDIR": str(self.root / "tmp"), **added}

    def tail(self) -> str:
        """The end of what the command has written."""
        try:
            with self.output.open("rb") as file:
                file.seek(max(0, self.output.stat().st_size - TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""

    def remove(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.root, ignore_errors=True)


class HarnessProcess:
    """A running command. It ends with the worker, however that ends, and so does all that it has started."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, command: Sequence[str], folder: HarnessFolder, environment: Mapping[str, str], prompt: bytes
    ) -> "HarnessProcess":
        """Start a command in the workspace of a folder, with the prompt as its standard input."""
        prompt_file = folder.root / "prompt"
        prompt_file.write_bytes(prompt)
        with prompt_file.open("rb") as stdin, folder.output.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                launcher.__file__,
                str(os.getpid()),
                str(folder.root),
                *command,
                stdin=stdin,
                stdout=output,
                stderr=output,
                cwd=folder.workspace,
                env=folder.environment(environment),
                start_new_session=True,
            )
        return cls(process)

    async def wait(self) -> int:
        """Wait until the command has ended; returns its exit code, or 128 and the signal that ended it."""
        return await self._process.wait()

    async def end(self) -> None:
        """End the command and all that it has started, if they run."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), END_S)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self._process.kill()
