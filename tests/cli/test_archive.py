"""`rollq archive` as a process, and its settings."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner

from rollq.buffer.archive.export import export
from rollq.buffer.archive.rows import Row
from rollq.buffer.buffer import Buffer
from rollq.buffer.errors import ServerUnavailable
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from rollq.cli.settings.file import load_settings
from support.buffer_run import World
from support.waiting import wait_until

FILE = """
run = "sums"
[redis]
buffer_url = "{url}"
[archive]
url = "{folder}"
[tasks.math]
prompts = "math.jsonl"
batch_groups = 2
group_size = 2
judge = "exact"
"""


@pytest.fixture
def file(fresh_server: EmbeddedServer, tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    path = tmp_path / "rollq.toml"
    path.write_text(FILE.format(url=fresh_server.url, folder=tmp_path / "archive"))
    return path


def test_a_run_that_is_over_is_archived(fresh_server: EmbeddedServer, file: Path) -> None:
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        world = World(buffer).start(math={"archive": True})
        world.complete(2)
        world.train(1)
        buffer.checkpoint(world.held, 1)
        found = CliRunner().invoke(main, ["archive", str(file), "--finish"])
        assert found.exit_code == 0, found.output
        assert world.statuses() == {}
    (written,) = (file.parent / "archive").rglob("*.parquet")
    assert parquet.read_table(written).num_rows == 4


def test_trained_steps_without_a_checkpoint_are_not_forgotten(fresh_server: EmbeddedServer, file: Path) -> None:
    finish = partial(CliRunner().invoke, main, ["archive", str(file), "--finish"])
    delete = partial(CliRunner().invoke, main, ["runs", "delete", str(file), "sums"])
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        world = World(buffer).start(math={"archive": True}, code={})
        world.complete(2)
        world.complete(2, "code")
        world.train(1, math=2, code=2)
        found = finish()
        assert found.exit_code == 1
        assert "trained groups are not archived yet (2 of task 'math'), because no checkpoint" in found.output
        assert "2 groups are not in the archive yet" in delete().output
        buffer.checkpoint(world.held, 1)
        assert "2 groups are not in the archive yet" in delete().output
        assert finish().exit_code == 0
        assert "archive" not in delete().output


def test_tasks_are_archived_where_there_is_an_archive(file: Path) -> None:
    assert load_settings(file).tasks["math"].archive
    file.write_text(file.read_text().replace("[archive]\nurl", "[payloads]\nurl"))
    assert not load_settings(file).tasks["math"].archive


def test_the_command_names_the_setting_that_it_needs(file: Path) -> None:
    file.write_text(file.read_text().replace("[archive]\nurl", "[payloads]\nurl"))
    found = CliRunner().invoke(main, ["archive", str(file)])
    assert found.exit_code == 2
    assert "`rollq archive` needs url in [archive]" in found.output


def test_groups_are_exported_from_the_buffer_and_from_the_archive(fresh_server: EmbeddedServer, file: Path) -> None:
    run, folder = CliRunner().invoke, file.parent
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        world = World(buffer).start(math={"archive": True})
        world.complete(2)
        world.train(1)
        found = run(main, ["export", str(file), '{"task": "math"}', "--to", str(folder / "buffer.jsonl")])
        assert found.output == f"wrote 2 groups to {folder / 'buffer.jsonl'}\n"
        buffer.checkpoint(world.held, 1)
        run(main, ["archive", str(file), "--finish"])
    options = ["--archive", str(folder / "archive"), "--format", "parquet", "--to", str(folder / "out.parquet")]
    found = run(main, ["export", "{}", *options])
    assert found.output == f"wrote 2 groups to {folder / 'out.parquet'}\n"
    assert parquet.read_table(folder / "out.parquet").num_rows == 4
    assert run(main, ["export", str(file), "{}", *options]).exit_code == 2
    found = run(main, ["export", "{}", *options[:-1], str(file / "out.parquet")])
    assert found.output == f"error: --to {str(file / 'out.parquet')!r}: cannot be written: Not a directory\n"


def has_more_than(folder: Path, files: set[Path]) -> bool:
    return set(folder.rglob("*.parquet")) > files


@pytest.mark.long
def test_archivers_that_are_killed_leave_every_group_once(
    fresh_server: EmbeddedServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = file.parent / "archive"
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        world = World(buffer).start(math={"archive": True})
        for step in range(1, 7):
            world.complete(2)
            world.train(step)
            buffer.checkpoint(world.held, step)
            if step % 2:
                continue
            files = set(folder.rglob("*.parquet"))
            command = [sys.executable, "-m", "rollq.cli.main", "archive", str(file)]
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as archiver:
                wait_until(partial(has_more_than, folder, files))
                archiver.send_signal(signal.SIGKILL)
            monkeypatch.setattr("rollq.buffer.calls.archiving.ARCHIVER_LEASE_MS", 0)
            CliRunner().invoke(main, ["archive", str(file), "--finish"])
        assert world.statuses() == {}
        world.check()
    rows = [row for path in folder.rglob("*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert Counter((row["group_id"], row["sample"]) for row in rows) == {
        (i, j): 1 for i in range(1, 13) for j in (0, 1)
    }


def test_an_archiver_waits_for_the_first_role_of_the_run(fresh_server: EmbeddedServer, file: Path) -> None:
    command = [sys.executable, "-m", "rollq.cli.main", "archive", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as archiver:
        assert archiver.stderr is not None
        assert b"waiting for run 'sums'" in archiver.stderr.readline()
        with Buffer.connect(fresh_server.url, "sums") as buffer:
            World(buffer).start(math={"archive": True})
        assert b"archiving run 'sums'" in archiver.stderr.readline()
        archiver.send_signal(signal.SIGINT)
        assert archiver.wait(60) == 0


def test_ctrl_c_stops_an_archiver(fresh_server: EmbeddedServer, file: Path) -> None:
    with Buffer.connect(fresh_server.url, "sums") as buffer:
        World(buffer).start(math={"archive": True})
    command = [sys.executable, "-m", "rollq.cli.main", "archive", str(file)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as archiver:
        assert archiver.stderr is not None
        assert b"archiving run 'sums'" in archiver.stderr.readline()
        archiver.send_signal(signal.SIGINT)
        assert archiver.wait(60) == 0


def test_a_server_that_is_lost_during_an_export_is_not_mistaken_for_the_file(tmp_path: Path) -> None:
    def groups() -> Iterator[list[Row]]:
        yield []
        raise ServerUnavailable("redis://127.0.0.1:6379/0: no answer")

    with pytest.raises(ServerUnavailable, match="no answer"):
        export(groups(), tmp_path / "out.jsonl", "jsonl")
    assert list(tmp_path.iterdir()) == []
