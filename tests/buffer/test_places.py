"""Places of processes: of this one, and of others as they report them."""

import os
import socket
from pathlib import Path

import pytest

from rollq.buffer.values.places import Place, gpus_here


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0,1", "0,1"), ("", ""), ("-1", ""), (None, "0,2,10"), ("GPU-" + 100 * "a", "GPU-" + 76 * "a")],
)
def test_gpus_are_those_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, gpus: str
) -> None:
    for name in ("nvidia10", "nvidia0", "nvidia2", "nvidiactl", "null", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus_here(tmp_path) == gpus


def test_this_process_is_found_by_its_machine_and_number() -> None:
    here = Place.here()
    assert (here.host, here.pid) == (socket.gethostname(), os.getpid())
    assert str(here) == f"{here.host}, process {here.pid}"


@pytest.mark.parametrize(
    "fields",
    [{}, {"host": "box"}, {"host": "", "pid": 3}, {"host": "box", "pid": "x"}, {"host": 3, "pid": 3}, {"pid": 3}],
)
def test_a_report_without_a_place_has_none(fields: dict[str, object]) -> None:
    assert Place.read(fields) is None


def test_a_report_gives_a_place_of_bounded_length() -> None:
    assert Place.read({"host": "b" * 500, "pid": "12", "gpus": None}) == Place("b" * 80, 12)
