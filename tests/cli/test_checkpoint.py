import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner, Result

from rollq.buffer.errors import StoreLost
from rollq.buffer.payloads.object_payloads import MARKER
from rollq.buffer.snapshots.folder import INDEX
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.cli.main import main
from rollq.cli.run_location import RunLocation, open_run
from rollq.cli.settings.file import load_settings
from rollq.producer.producer import Producer, TaskFeed
from rollq.producer.prompts import PromptFile
from rollq.producer.sampler import Sampler
from support.buffer_run import OUTSIDE_BYTES, World, text_of


def rollq(*args: object, **environment: str) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], env=environment)


def write_config(path: Path, url: str, run: str, *, rules: str = "", more: str = "") -> Path:
    """A `rollq.toml` with a task of 300 prompts."""
    prompts = b"".join(orjson.dumps({"prompt": str(i), "answer": i}) + b"\n" for i in range(300))
    (path.parent / "p.jsonl").write_bytes(prompts)
    path.write_text(
        f'run = "{run}"\n[redis]\nbuffer_url = "{url}"\n'
        f'[tasks.math]\nprompts = "p.jsonl"\nbatch_groups = 4\ngroup_size = 1\n{rules}\n{more}\n'
    )
    return path


@pytest.fixture
def here(tmp_path: Path, server_url: str, run_name: str) -> Path:
    return write_config(tmp_path / "here.toml", server_url, run_name)


@pytest.fixture
def there(tmp_path: Path, fresh_server: EmbeddedServer, run_name: str) -> Path:
    """The same run on another server."""
    return write_config(tmp_path / "there.toml", fresh_server.url, run_name)


@contextmanager
def roles(config: Path) -> Iterator[tuple[Producer, World]]:
    """A producer as `rollq produce` makes it, and a stand-in for worker and trainer."""
    settings = load_settings(config, {})
    with ExitStack() as stack:
        source = stack.enter_context(PromptFile(settings.tasks["math"]))
        feed = TaskFeed("math", Sampler(source, (settings.seed, 0), 1.0), 4096)
        buffer = stack.enter_context(open_run(settings, threading.Event()))
        yield Producer(buffer, RunLocation.from_settings(settings).queue(), settings.producer, [feed]), World(buffer)


def prompts_of(world: World) -> list[str]:
    """The prompts of all groups that are stored, in the order in which they were admitted."""
    admitted = int(world.buffer.counts("math").progress["admitted"])
    groups = [world.buffer.inspect("math", group_id) for group_id in range(1, admitted + 1)]
    return [orjson.loads(group["prompt"])["content"] for group in groups]


def go_on(producer: Producer, world: World) -> list[int]:
    """Two more train steps, with all the production that they allow. Returns the groups that were trained."""
    trained = []
    for step in (2, 3):
        producer.tick()
        world.put(world.lease(100))
        trained += [group.group_id for group in world.train(step, math=4).groups]
    producer.tick()
    return trained


def test_xm05_checkpoint_and_resume_keep_the_prompt_order_and_every_completed_group(
    here: Path, there: Path, tmp_path: Path
) -> None:
    with roles(here) as (producer, world):
        world.begin(0, launch_id="first")
        producer.tick()
        world.put(world.lease(6))
        world.train(1, math=4)
        assert world.statuses() == {"pending": 2, "completed": 2, "archived": 4}
        saved = rollq("snapshot", "save", here, tmp_path / "saved")
        assert saved.exit_code == 0, saved.output
        assert "it belongs to the trainer's checkpoint of step 1" in saved.output
        trained, prompts = go_on(producer, world), prompts_of(world)
        assert len(set(prompts)) == len(prompts) == 20

    restored = rollq("snapshot", "load", there, tmp_path / "saved")
    assert restored.exit_code == 0, restored.output
    with roles(there) as (producer, world):
        # nothing is generated until the trainer says so
        producer.tick()
        assert world.lease(100) == ()
        assert world.statuses() == {"pending": 2, "completed": 2, "archived": 4}
        world.begin(1, launch_id="second")
        assert go_on(producer, world) == trained
        assert prompts_of(world) == prompts
        world.check()


def test_xs04_a_task_without_saved_state_begins_at_its_beginning_with_a_warning(
    here: Path, tmp_path: Path, fresh_server: EmbeddedServer, run_name: str
) -> None:
    # where the other systems warn of a missing state file, rollq warns of a task that the whole folder does not know
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(1)
        assert rollq("snapshot", "save", here, tmp_path / "saved").exit_code == 0
    more = '[tasks.code]\nprompts = "p.jsonl"\nbatch_groups = 4\ngroup_size = 1\n'
    more += '[evaluations.held_out]\nprompts = "p.jsonl"\n'
    grown = write_config(tmp_path / "grown.toml", fresh_server.url, run_name, more=more)
    result = rollq("snapshot", "load", grown, tmp_path / "saved")
    assert result.exit_code == 0
    assert [line.split(" is ")[0] for line in result.stderr.splitlines()] == [
        "warning: task 'code'",
        "warning: task 'held_out'",
    ]
    with roles(grown) as (_, world):
        world.begin(0, launch_id="second")
        assert world.statuses() == {"completed": 1}
        assert world.buffer.counts("code").progress["cursor"] == 0


def test_a_run_can_be_saved_and_restored_by_url_and_under_another_name(
    here: Path, tmp_path: Path, server_url: str, run_name: str
) -> None:
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(2)
        place = ("--url", server_url, "--run")
        assert rollq("snapshot", "save", tmp_path / "saved", *place, run_name).exit_code == 0
        result = rollq("snapshot", "load", tmp_path / "saved", *place, f"{run_name}-fork")
        assert result.exit_code == 0, result.output
        assert f"restored 2 groups of run '{run_name}'" in result.output
    with RunLocation.at(server_url, f"{run_name}-fork").buffer() as fork:
        assert World(fork).statuses() == {"completed": 2}


def test_xb16_resuming_into_a_non_empty_buffer_or_under_another_policy_is_refused_with_a_clear_error(
    here: Path, tmp_path: Path, fresh_server: EmbeddedServer, run_name: str
) -> None:
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(2)
        assert rollq("snapshot", "save", here, tmp_path / "saved").exit_code == 0
        again = rollq("snapshot", "load", here, tmp_path / "saved")
        assert again.exit_code == 2
        assert "error: the run exists here already" in again.output
        assert world.statuses() == {"completed": 2}
    other = write_config(tmp_path / "other.toml", fresh_server.url, run_name, rules='batches.order = "arrival"')
    refused = rollq("snapshot", "load", other, tmp_path / "saved")
    assert refused.exit_code == 2
    assert "error: task 'math' was saved with order = staleness, but the settings have arrival" in refused.output
    with RunLocation.from_settings(load_settings(other, {})).buffer() as buffer, pytest.raises(StoreLost):
        buffer.tasks()


def test_a_folder_in_use_is_refused_and_a_former_snapshot_is_replaced_when_asked(here: Path, tmp_path: Path) -> None:
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(2)
        busy = rollq("snapshot", "save", here, tmp_path)
        assert (busy.exit_code, "exists and is not a snapshot: name another folder" in busy.output) == (2, True)
        for expected in (0, 2):
            result = rollq("snapshot", "save", here, tmp_path / "saved")
            assert result.exit_code == expected
        assert "holds a snapshot already: name another folder, or pass --replace" in result.output
        assert rollq("snapshot", "save", here, tmp_path / "saved", "--replace").exit_code == 0


def test_a_folder_without_a_snapshot_and_a_damaged_one_are_named(here: Path, there: Path, tmp_path: Path) -> None:
    nothing = rollq("snapshot", "load", there, tmp_path / "nothing")
    assert (nothing.exit_code, f"is not a snapshot: it has no {INDEX}" in nothing.output) == (1, True)
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(2)
        assert rollq("snapshot", "save", here, tmp_path / "saved").exit_code == 0
    damaged = tmp_path / "saved" / "task-math" / "groups-00000.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = rollq("snapshot", "load", there, tmp_path / "saved")
    assert (result.exit_code, f"error: {damaged}: its SHA-256" in result.output) == (1, True)


def test_a_run_that_is_not_there_cannot_be_saved(here: Path, tmp_path: Path) -> None:
    result = rollq("snapshot", "save", here, tmp_path / "saved")
    assert (result.exit_code, "is not in this store" in result.output) == (1, True)
    assert not (tmp_path / "saved").exists()


def test_the_place_is_either_a_file_or_a_url_with_a_run(here: Path, tmp_path: Path) -> None:
    for command in ("save", "load"):
        for place in ([here, tmp_path / "saved", "--run", "x"], [tmp_path / "saved", "--url", "redis://127.0.0.1:1"]):
            result = rollq("snapshot", command, *place)
            assert (result.exit_code, "give either FILE" in result.output) == (2, True)


@pytest.fixture
def outside(here: Path, tmp_path: Path) -> Path:
    """The folder in which a run that is saved has its large payloads."""
    folder = tmp_path / "payloads"
    folder.mkdir()
    here.write_text(here.read_text() + with_payloads(folder))
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(4)
    return folder


def with_payloads(folder: Path) -> str:
    return f'[payloads]\nurl = "{folder}"\nmin_bytes = {OUTSIDE_BYTES}\n'


def payload_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]


def test_a_run_with_payloads_outside_is_saved_only_with_them(
    outside: Path, tmp_path: Path, server_url: str, run_name: str
) -> None:
    place, saved = ("--url", server_url, "--run", run_name), tmp_path / "saved"
    assert rollq("groups", "query", "{}", *place, "--count").output == "4\n"
    assert rollq("status", *place).exit_code == 0
    before = set(tmp_path.rglob("*"))
    refused = rollq("snapshot", "save", saved, *place)
    assert (refused.exit_code, refused.output) == (
        2,
        f"error: run {run_name!r} keeps payloads outside its servers: set payloads.url as for its other roles, or, for "
        "a command with --url, ROLLQ_PAYLOADS_URL; a custom trainer passes payloads=PayloadSettings(url=...) to "
        "Connection\n",
    )
    assert set(tmp_path.rglob("*")) == before
    other = tmp_path / "other"
    other.mkdir()
    refused = rollq("snapshot", "save", saved, *place, ROLLQ_PAYLOADS_URL=str(other))
    assert (refused.exit_code, "has nothing of this run" in refused.output) == (2, True)
    assert rollq("snapshot", "save", saved, *place, ROLLQ_PAYLOADS_URL=str(outside)).exit_code == 0


@pytest.mark.parametrize("to", ["servers", "folder"])
def test_a_run_with_payloads_outside_is_restored_with_and_without_them(
    to: str, here: Path, there: Path, outside: Path, tmp_path: Path
) -> None:
    assert len(payload_files(outside)) == 1
    assert rollq("snapshot", "save", here, tmp_path / "saved").exit_code == 0
    folder = tmp_path / "there"
    folder.mkdir()
    if to == "folder":
        there.write_text(there.read_text() + with_payloads(folder))
    restored = rollq("snapshot", "load", there, tmp_path / "saved")
    assert restored.exit_code == 0, restored.output
    assert len(payload_files(folder)) == (to == "folder")
    with roles(there) as (_, world):
        world.begin(0, launch_id="second")
        assert all_samples(world) == [text_of(group_id) for group_id in range(1, 5)]


def test_a_run_without_payloads_outside_is_saved_and_restored_with_them(
    here: Path, there: Path, tmp_path: Path
) -> None:
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        world.complete(4)
    folder = tmp_path / "payloads"
    folder.mkdir()
    for config in (here, there):
        config.write_text(config.read_text() + with_payloads(folder))
    assert rollq("snapshot", "save", here, tmp_path / "saved").exit_code == 0
    assert rollq("snapshot", "load", there, tmp_path / "saved").exit_code == 0
    assert len(payload_files(folder)) == 1
    with roles(there) as (_, world):
        world.begin(0, launch_id="second")
        assert all_samples(world) == [text_of(group_id) for group_id in range(1, 5)]


def all_samples(world: World) -> list[str]:
    """The texts of the groups of the next batch, in order of their ids."""
    groups = sorted(world.claim(1, math=4).groups, key=lambda group: group.group_id)
    return [group.samples[0].text for group in world.buffer.fetch(groups)]


def test_a_folder_that_cannot_be_written_is_named(here: Path) -> None:
    with roles(here) as (_, world):
        world.begin(0, launch_id="first")
        result = rollq("snapshot", "save", here, here / "saved")
    assert result.exit_code == 2
    assert result.output == f"error: snapshot folder {str(here / 'saved')!r}: cannot be written: Not a directory\n"
