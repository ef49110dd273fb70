"""The check of the folder or the bucket for payloads, on real ones."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.rules.settings import PayloadSettings, TaskRules
from rollq.buffer.store.connection import Patience
from rollq.monitor.doctor import payloads
from rollq.monitor.doctor.examine import Sizing, examine_payloads
from rollq.monitor.doctor.findings import Finding, Level
from rollq.monitor.doctor.payloads import read_payload_facts
from rollq.monitor.doctor.sizing import TaskSize
from support.any_server import AnyServer
from support.buffer_run import OUTSIDE_BYTES, World, payloads_in
from support.s3_server import S3Server

NOTHING_PLANNED = Sizing({}, measured=0)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture
def outsider(any_server: AnyServer, run_name: str) -> Iterator[Buffer]:
    """A buffer that knows of no payloads outside, and has no run yet."""
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield buffer


def examined(buffer: Buffer, settings: PayloadSettings, sizing: Sizing = NOTHING_PLANNED) -> Finding:
    (finding,) = examine_payloads(buffer.servers, buffer.run, settings, sizing)
    return finding


def files(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("place", ["folder", "s3"])
def test_a_place_that_can_be_used_is_left_as_it_was(
    place: str, outsider: Buffer, any_server: AnyServer, tmp_path: Path, bucket: S3Server
) -> None:
    settings = payloads_in(tmp_path) if place == "folder" else PayloadSettings(url=bucket.url)
    root = tmp_path if place == "folder" else bucket.bucket
    before = files(root)
    assert examined(outsider, settings).level is Level.OK
    assert {path for path in files(root) - before if path.is_file() or place == "folder"} == set()
    with Buffer.connect(any_server.url, outsider.run, payloads=settings) as buffer:
        World(buffer).start()
        before = files(root)
        finding = examined(buffer, settings)
        assert finding.level is Level.OK
        assert "an object could be written, read, listed and removed in" in finding.message
        assert files(root) == before


def test_a_run_whose_payloads_are_elsewhere_is_an_error(
    outsider: Buffer, any_server: AnyServer, tmp_path: Path
) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    with Buffer.connect(any_server.url, outsider.run, payloads=payloads_in(mine)) as buffer:
        buffer.create_run()
    finding = examined(outsider, payloads_in(other))
    assert (finding.level, "has nothing of this run" in finding.message) == (Level.ERROR, True)
    assert files(other) == set()
    finding = examined(outsider, PayloadSettings())
    assert (finding.level, "set payloads.url as for its other roles" in finding.message) == (Level.ERROR, True)


def test_a_run_without_payloads_elsewhere_needs_no_check(outsider: Buffer, tmp_path: Path) -> None:
    assert list(examine_payloads(outsider.servers, outsider.run, PayloadSettings(), NOTHING_PLANNED)) == []
    outsider.create_run()
    assert list(examine_payloads(outsider.servers, outsider.run, PayloadSettings(), NOTHING_PLANNED)) == []
    finding = examined(outsider, payloads_in(tmp_path))
    assert (finding.level, "was created without payloads.url" in finding.message) == (Level.ERROR, True)


def test_a_folder_that_is_not_there_is_an_error(outsider: Buffer, tmp_path: Path) -> None:
    finding = examined(outsider, PayloadSettings(url=str(tmp_path / "missing")))
    assert (finding.level, "there is no such folder on this machine" in finding.message) == (Level.ERROR, True)


def test_a_folder_that_takes_no_files_is_an_error(outsider: Buffer) -> None:
    finding = examined(outsider, PayloadSettings(url="/proc"))  # for root too
    assert (finding.level, finding.message.startswith("payloads.url = '/proc': ")) == (Level.ERROR, True)


def test_the_room_in_a_folder_is_compared_with_what_may_come(
    outsider: Buffer, any_server: AnyServer, tmp_path: Path
) -> None:
    settings = payloads_in(tmp_path)
    task = TaskSize(TaskRules(batch_groups=1), payload_bytes=2**60, checkpoint_steps=1, outside_bytes=2**60)
    planned = Sizing({"math": task}, measured=0)
    assert "groups may take 4,294,967,296.0 GiB more" in examined(outsider, settings, planned).message
    assert examined(outsider, settings).level is Level.OK
    bound = settings.model_copy(update={"max_buffer_bytes": 1})
    assert examined(outsider, bound, planned).level is Level.OK
    bound = settings.model_copy(update={"max_buffer_bytes": 2**60})
    with Buffer.connect(any_server.url, outsider.run, payloads=settings) as buffer:
        world = World(buffer).start()
        before = examined(buffer, bound)
        assert (before.level, before.commands) == (Level.WARNING, (f"df -h {tmp_path}",))
        world.complete(4)
        assert read_payload_facts(buffer.servers, buffer.run, bound, Patience()).taken_bytes > OUTSIDE_BYTES


def test_wrong_credentials_are_an_error(outsider: Buffer, bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    finding = examined(outsider, PayloadSettings(url=bucket.url))
    assert (finding.level, "the right to read, write, list and delete" in finding.message) == (Level.ERROR, True)
    assert "wrong" not in finding.message


def test_a_bucket_that_never_answers_is_an_error(
    outsider: Buffer, bucket: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        finding = examined(outsider, PayloadSettings(url=bucket.url))
    assert (finding.level, finding.message) == (
        Level.ERROR,
        f"payloads.url = '{bucket.url}': does not answer within 0.5 s",
    )


def test_a_bucket_needs_obstore(outsider: Buffer, bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    finding = examined(outsider, PayloadSettings(url=bucket.url))
    assert (finding.level, "pip install 'rollq[s3]'" in finding.message) == (Level.ERROR, True)
