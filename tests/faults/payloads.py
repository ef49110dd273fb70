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
from support.buffer_run import World
from support.s3_server import S3Server

SERVED = "FAULTS_SERVED_FOLDER"
INLINE_BYTES, OUTSIDE_BYTES = 1000, 2000
"""The largest frame that passes through functions, and the smallest one in the folder."""


def payloads_in(folder: Path) -> PayloadSettings:
    """The settings of a run in `folder`; makes the folder of its payloads."""
    payloads = payload_folder(folder)
    payloads.mkdir(parents=True, exist_ok=True)
    return PayloadSettings(url=os.environ.get("ROLLQ_PAYLOADS_URL") or str(payloads), min_bytes=OUTSIDE_BYTES)


def payload_folder(folder: Path) -> Path:
    """The folder of the payloads of a run in `folder`, or the one that an object store serves."""
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


def collect(url: str, run: str, folder: Path) -> None:
    """Remove the payloads that nobody needs, as producers do, with two passes of their audit."""
    with Buffer.connect(url, run, payloads=payloads_in(folder)) as buffer:
        World(buffer).collect_without_check()
