"""The gateway in a process of its own, with one session whose model answers every call with `Hello`."""

import asyncio
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rollq.workers.gateway.http_server import Server
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.gateway.sessions.asked_calls import SessionLimits
from rollq.workers.settings import GatewaySettings
from support.chat_engine import Model, chat_tokenizer
from support.gateway_calls import make_session
from support.strangers import with_few_files
from support.waiting import PATIENCE_S

CALLS = 10_000


@dataclass
class GatewayProcess:
    """Where it listens, the token of its session, and where its log goes."""

    url: str
    token: str
    log: Path
    pid: int


@contextmanager
def gateway_process(folder: Path, *, files: int) -> Iterator[GatewayProcess]:
    """A gateway whose process may open `files` files."""
    command = with_few_files([sys.executable, "-m", "support.gateway_process"], files)
    log = folder / "gateway.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=Path(__file__).parents[1]
        ) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"(\S+) (\S+)\n", process.stdout.readline())
            assert found, log.read_text()
            yield GatewayProcess(found[1], found[2], log, process.pid)
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
        finally:
            process.kill()


async def _serve(folder: Path) -> None:
    model = Model(chat_tokenizer(folder), ["Hello"] * CALLS)
    gateway = Gateway(GatewaySettings())
    await Server(gateway).start()
    with gateway.serving(make_session(model, limits=SessionLimits(CALLS, 0, 8, 60))) as token:
        print(gateway.url, token, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig()
    with TemporaryDirectory() as name:
        asyncio.run(_serve(Path(name)))
