"""Names that somebody has written into Redis lead to no file of others."""

from pathlib import Path

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import RunMismatch, ServerRefused
from rollq.buffer.payloads.files import Folder
from support.buffer_run import World, payloads_in

FORGED = ["../other", "x/../../other", "/etc", "0" * 31, "0" * 33, "G" * 32, "0" * 32 + "\n", ""]


@pytest.mark.parametrize("incarnation", FORGED)
def test_a_forged_incarnation_is_refused_wherever_it_is_read(
    buffer: Buffer, server_url: str, tmp_path: Path, incarnation: str
) -> None:
    World(buffer).start()
    buffer.client.hset(buffer.keys.info, mapping={"incarnation": incarnation})
    with Buffer.connect(server_url, buffer.run, payloads=payloads_in(tmp_path / "payloads")) as other:
        with pytest.raises(RunMismatch, match="which rollq never writes"):
            other.incarnation  # noqa: B018 - reading it is the test
        with pytest.raises(RunMismatch, match="which rollq never writes"):
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
