"""Where samples are in the fault suite: small frames pass through functions, larger ones are on the server, and the
largest in a folder."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.store import server_folder
from support.buffer_run import World
from support.s3_server import S3Server

SERVED = "FAULTS_SERVED_FOLDER"
IN_SERVER_FOLDER = "FAULTS_IN_SERVER_FOLDER"
"""Set while the largest payloads are in the folder of the embedded server."""
INLINE_BYTES, OUTSIDE_BYTES = 1000, 2000
"""The largest frame that passes through functions, and the smallest one in the folder."""


def payloads_in(folder: Path) -> PayloadSettings:
    """The settings of a run in `folder`; makes the folder of its payloads."""
    if IN_SERVER_FOLDER in os.environ:
        return PayloadSettings(min_bytes=OUTSIDE_BYTES)
    payloads = payload_folder(folder)
    payloads.mkdir(parents=True, exist_ok=True)
    return PayloadSettings(url=os.environ.get("ROLLQ_PAYLOADS_URL") or str(payloads), min_bytes=OUTSIDE_BYTES)


def payload_folder(folder: Path) -> Path:
    """The folder of the payloads of a run in `folder`, or the one that an object store serves."""
    if IN_SERVER_FOLDER in os.environ:
        return folder / "server" / server_folder.NAME
    return Path(os.environ.get(SERVED) or folder / "payloads")


@contextmanager
def in_bucket() -> Iterator[None]:
    """Let the runs in the block, and their roles, keep payloads in a bucket of an object store."""
    with (
        tempfile.TemporaryDirectory() as folder,
        S3Server(Path(folder)) as server,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in {**server.environment, "ROLLQ_PAYLOADS_URL": server.url}.items():
            patch.setenv(name, value)
        patch.setenv(SERVED, str(server.bucket / server.url.removeprefix(f"s3://{server.bucket.name}/")))
        yield


@contextmanager
def in_server_folder() -> Iterator[None]:
    """Let the runs in the block, and their roles, keep payloads in the folder of their embedded server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(IN_SERVER_FOLDER, "1")
        yield


def collect(url: str, run: str, folder: Path) -> None:
    """Remove the payloads that nobody needs, as producers do, with two passes of their audit."""
    with Buffer.connect(url, run, payloads=payloads_in(folder)) as buffer:
        World(buffer).collect_without_check()
