"""The rows of a task set, which a process of the other Python writes."""

import subprocess
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from rollq.buffer.common import exact_json
from rollq.buffer.errors import ConfigError
from rollq.environments.verifiers.other_python import command, variables


def written(
    what: str, asked: Mapping[str, Any], python: str, named: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """The objects that a runner writes with the option `what`; closing the iterator ends the process. Raises
    `ConfigError` with its error."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command(python, what), env=variables(named), **pipes) as process:  # type: ignore[call-overload]
        said: list[str] = []
        reader = threading.Thread(target=_keep, args=(process.stderr, said), daemon=True)
        reader.start()
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(exact_json.dumps(asked) + b"\n")
                process.stdin.close()
            for line in process.stdout:
                yield exact_json.loads(line)
            if process.wait():
                reader.join(timeout=1)
                raise ConfigError(said[-1] if said else "the process of its rows died")
        finally:
            process.kill()
            process.wait()
            reader.join()


def _keep(lines: IO[bytes], kept: list[str]) -> None:
    with suppress(ValueError):  # nobody wants the rest
        for line in lines:
            if text := line.decode(errors="replace").strip():
                kept[:] = [*kept[-20:], text]
