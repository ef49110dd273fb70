"""Names that somebody has written into Redis lead to no file of others."""

from contextlib import closing
from pathlib import Path

import pytest
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import RunMismatch, ServerRefused
from rollq.buffer.payloads.folders_and_buckets import Folder
from rollq.buffer.store.keys import task_keys
from rollq.buffer.tickets import open_queue
from support.buffer_run import World, payloads_in

FORGED = ["../other", "x/../../other", "/etc", "0" * 31, "0" * 33, "G" * 32, "0" * 32 + "\n", ""]


@pytest.mark.parametrize("incarnation", FORGED)
def test_a_forged_incarnation_is_refused_wherever_it_is_read(
    buffer: Buffer, server_url: str, tmp_path: Path, incarnation: str
) -> None:
    World(buffer).start()
    buffer.client.hset(buffer.keys.info, mapping={"incarnation": incarnation})
    with Buffer.connect(server_url, buffer.run, payloads=payloads_in(tmp_path / "payloads")) as other:
        with pytest.raises(RunMismatch, match="which rollq did not write"):
            other.incarnation  # noqa: B018 - reading it is the test
        with pytest.raises(RunMismatch, match="which rollq did not write"):
            other.create_run()


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "a//b", "a/./b", "..", "", "a\0b"])
def test_no_name_leads_out_of_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "a").write_text("theirs")
    folder = Folder(str(tmp_path / "inside"))
    for use in (folder.get, folder.remove, folder.size_bytes, folder.remove_folder, folder.check_mounted):
        with pytest.raises(ServerRefused, match="is not the name of a file below"):
            use(name)
    with pytest.raises(ServerRefused, match="is not the name of a file below"):
        folder.put(name, b"mine")
    assert (tmp_path / "a").read_text() == "theirs"


NO_TASKS = [b"\xff\xfe", b"a\nb 1", b'a"b\\', b"", b"a" * 65, b"x y", b"{math}", b"\xed\xa0\x80", b"..", b"math\n"]


@pytest.mark.parametrize("name", NO_TASKS)
def test_a_name_that_no_task_can_have_hides_no_other(
    buffer: Buffer, server_url: str, name: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    World(buffer).start(math={})
    buffer.client.sadd(buffer.keys.tasks, name)
    with caplog.at_level("WARNING"):
        assert buffer.tasks() == ["math"]
        assert buffer.tasks() == ["math"]
    assert "names that no task can have are left out: 1" in caplog.text
    assert len(caplog.records) == 1
    with closing(open_queue(server_url, buffer.run).connection) as connection:
        buffer.client.delete(buffer.keys.trainer, buffer.keys.workers)  # as long after they ended
        buffer.client.hdel(task_keys(buffer.run, "math").clock, "reaped_ms")
        buffer.delete_run(Queue(buffer.run, connection=connection))
    assert not buffer.client.exists(buffer.keys.tasks)


@pytest.mark.parametrize("report", [b"", b"x", b"1", b"1 x", b"1 []", b"1 3", b"x {}", b"1 {", b"\xff \xff"])
def test_a_report_that_no_worker_writes_hides_no_other(buffer: Buffer, report: bytes) -> None:
    World(buffer).start(math={})
    buffer.report_worker("worker-1", {"state": "serving"})
    buffer.client.hset(buffer.keys.workers, b"\xff", report)
    assert set(buffer.workers()) == {"worker-1"}
