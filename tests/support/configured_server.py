"""A server with a configuration file, as an operator runs it: without the embedded server around it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from support.waiting import wait_until


@contextmanager
def configured_server(binary: Path, config: Path, port: int) -> "Iterator[subprocess.Popen[bytes]]":
    """Run the server `binary` with the file `config` on `port`, with its data beside that file, once it answers."""
    command: list[str | Path] = [binary, config, "--port", str(port), "--dir", config.parent]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: _answers(port))
        yield server
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    """Whether a server replies to a stranger, be it with a refusal."""
    with redis.Redis(port=port) as client:
        try:
            return bool(client.ping())
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
