"""Where samples are in the fault suite: small frames pass through functions, larger ones are on the server, and the
largest in a folder."""

from pathlib import Path

from rollq.buffer.buffer import Buffer
from rollq.buffer.settings import PayloadSettings
from support.buffer_run import World

INLINE_BYTES, OUTSIDE_BYTES = 1000, 2000
"""The largest frame that passes through functions, and the smallest one in the folder."""


def payloads_in(folder: Path) -> PayloadSettings:
    """The settings of a run in `folder`; makes the folder of its payloads."""
    payloads = payload_folder(folder)
    payloads.mkdir(exist_ok=True)
    return PayloadSettings(url=str(payloads), min_bytes=OUTSIDE_BYTES)


def payload_folder(folder: Path) -> Path:
    """The folder of the payloads of a run in `folder`."""
    return folder / "payloads"


def collect(url: str, run: str, folder: Path) -> None:
    """Remove the payloads that nobody needs, as producers do, with two passes of their audit."""
    with Buffer.connect(url, run, payloads=payloads_in(folder)) as buffer:
        World(buffer).collect_without_check()
