"""Fixtures of the tests of pages."""

import shutil
from pathlib import Path

import pytest

from rollq.buffer.common.ports import free_port
from support.documented_commands import Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, free_port("127.0.0.1"))


@pytest.fixture
def sums(desk: Desk, prepared_demo: Path) -> Path:
    """The folder `sums` on the desk, as `rollq demo --prepare --out sums` makes it."""
    return shutil.copytree(prepared_demo, desk.folder / "sums")
