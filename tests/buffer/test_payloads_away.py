"""Payloads that are away from their task's slot: in another slot of a cluster, in a folder, in an object store.

A group and its payload are never written together here, so every moment in between is looked at.
"""

import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rq import Queue

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.payload_removal import AUDIT_PAUSE_S, Audit
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ConfigError, CorruptGroup, RunMismatch, ServerRefused, ServerUnavailable, StoreLost
from rollq.buffer.payloads import folders_and_buckets as files
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.payloads.object_payloads import MARKER
from rollq.buffer.rules.names import check_name
from rollq.buffer.rules.settings import PayloadSettings
from rollq.buffer.snapshots import save as saving
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import task_keys
from rollq.buffer.store.redis_functions import Call
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import GroupResult, Lease, SampleStatus, Status
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from rollq.buffer.wire.joined_frame import Pieces
from support.any_server import AnyServer
from support.buffer_run import World, make_sample, payloads_of
from support.dropped_groups import drop_by_checkpoint, drop_by_new_samples, drop_by_release
from support.late_copies import name_of
from support.s3_server import S3Server

LARGE = "y" * (MOST_INLINE_BYTES + 1)
IMPATIENT = Patience(unanswered_s=0.0, unready_s=0.0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A server has no place for payloads that are away; a cluster has."""
    if "place" in metafunc.fixturenames:
        on_cluster = metafunc.config.getoption("--server") == "cluster"
        metafunc.parametrize("place", ["folder", "s3", *(["cluster"] if on_cluster else [])])


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def payloads(
    place: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> PayloadSettings:
    """Settings with which large frames are in the chosen place."""
    if place == "cluster":
        return PayloadSettings()
    if place == "folder":
        return PayloadSettings(url=str(tmp_path), min_bytes=MOST_INLINE_BYTES + 1)
    server: S3Server = request.getfixturevalue("s3")
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return PayloadSettings(url=server.url, min_bytes=MOST_INLINE_BYTES + 1)


@pytest.fixture
def world(any_server: AnyServer, run_name: str, payloads: PayloadSettings) -> Iterator[World]:
    with Buffer.connect(any_server.url, run_name, payloads=payloads) as buffer:
        yield World(buffer)


def stored(world: World) -> set[PayloadName]:
    """The payloads that there are, of use or not."""
    return {name for page in world.buffer.payloads.pages() for name in page}


def named(world: World, task: str = "math") -> set[PayloadName]:
    """The payloads that groups name."""
    return {name for text in payloads_of(world.buffer, task).values() if (name := PayloadName.parse(task, text))}


def result(lease: Lease, text: str = LARGE, *, reward: float = 1.0) -> GroupResult:
    return GroupResult(lease, (make_sample(0, text=text, reward=reward),) * len(lease.samples))


def put_large(world: World, n: int = 1) -> list[Lease]:
    world.admit(n)
    leases = list(world.lease(n))
    assert world.buffer.put([result(lease) for lease in leases]) == [PutOutcome.COMPLETED] * n
    return leases


def test_a_large_payload_is_away_and_a_small_one_is_not(world: World) -> None:
    world.start().admit(2)
    small, large = world.lease(2)
    assert world.buffer.put([result(small, "small"), result(large)]) == [PutOutcome.COMPLETED] * 2
    (name,) = stored(world)
    assert (name.group_id, name.leaf.partition("-")[0]) == (large.group_id, large.nonce)
    assert stored(world) == named(world)
    groups = world.claim(1).groups
    assert [group.samples[0].text for group in world.buffer.fetch(groups)] == ["small", LARGE]
    assert world.buffer.sizes_bytes(groups)[1] > len(LARGE)
    world.check()


def refused(world: World) -> Lease:
    """A result of a lease that has run out."""
    world.start().admit(1)
    (lease,) = world.lease(1)
    world.run_out([lease])
    world.buffer.reap("math")
    assert world.buffer.put([result(lease)]) == [PutOutcome.REFUSED]
    return lease


def repeated(world: World) -> Lease:
    """Another result of a lease that has one."""
    (lease,) = put_large(world.start())
    assert world.buffer.put([result(lease, "z" * 50_000)]) == [PutOutcome.DUPLICATE]
    return lease


def twice_in_a_call(world: World) -> Lease:
    """Two results of a lease together: the first one counts."""
    world.start().admit(1)
    (lease,) = world.lease(1)
    both = [result(lease), result(lease, "z" * 50_000, reward=0.0)]
    assert world.buffer.put(both) == [PutOutcome.COMPLETED, PutOutcome.DUPLICATE]
    return lease


@pytest.mark.parametrize("surplus", [refused, repeated, twice_in_a_call])
def test_a_payload_that_no_group_takes_is_garbage(world: World, surplus: Callable[[World], Lease]) -> None:
    surplus(world)
    assert len(stored(world) - named(world)) == 1
    assert world.buffer.collect("math") == 1
    assert stored(world) == named(world)
    if named(world):
        (group,) = world.buffer.fetch(world.claim(1, math=1).groups)
        assert (group.samples[0].text, group.samples[0].reward) == (LARGE, 1.0)
    world.check()


def test_a_late_copy_of_a_result_does_not_take_the_payload_that_its_group_still_has(world: World) -> None:
    """The group was put, a sample of it has expired, and the group is leased again: its payload has the other one."""
    world.start(math={"batch_groups": 1, "max_staleness": 1})
    put_large(world, 2)
    world.train(1, math=1)
    world.admit(1)
    (lease,) = world.lease(1)
    half = GroupResult(lease, (make_sample(0, text=LARGE), make_sample(1, text="young")))
    world.buffer.put([half])
    world.train(2, math=1)
    world.buffer.expire("math")
    world.buffer.recycle("math", epoch=world.held.epoch, target=100, limit=100, statuses=[Status.EXPIRED])
    world.lease(10)
    assert world.buffer.put([half]) == [PutOutcome.REFUSED]
    world.collect()
    world.run_out([replace(lease, attempt=2)])
    world.buffer.reap("math")
    (again,) = [each for each in world.lease(10) if each.group_id == lease.group_id]
    assert [sample.status for sample in again.samples] == [SampleStatus.PENDING, SampleStatus.COMPLETED]
    assert again.samples[1].text == "young"
    world.check()


@pytest.mark.parametrize("drop", [drop_by_checkpoint, drop_by_release, drop_by_new_samples])
def test_what_a_group_drops_is_collected(world: World, drop: Callable[[World], None]) -> None:
    put_large(world.start(), 2)
    drop(world)
    assert len(stored(world)) == 2  # functions cannot remove it
    assert world.buffer.collect("math") == 2
    assert not stored(world)
    world.check()


def test_copies_of_a_group_share_a_payload_until_the_last_one_goes(world: World) -> None:
    world.start(math={"batch_groups": 1, "max_uses": 3, "max_staleness": 8, "reuse_cooldown_steps": 0})
    put_large(world)
    (name,) = stored(world)
    for step in (1, 2):
        world.train(step, math=1)
        world.buffer.checkpoint(world.held, step)
        world.collect()
        assert stored(world) == named(world) == {name}
        world.check()
    (group,) = world.buffer.fetch(world.claim(3, math=1).groups)
    assert group.samples[0].text == LARGE
    world.train(3, math=1)
    world.buffer.checkpoint(world.held, 3)
    world.collect()
    assert not stored(world)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing handles it."""


def die_here() -> None:
    """Die."""
    raise Killed


def die_before(world: World, name: str) -> None:
    """Let the buffer die at its next call of the function `name`."""
    call_each = world.buffer.call_each

    def die(calls: Callable[[], Iterable[Call]]) -> list[Any]:
        if name in map(name_of, calls()):
            raise Killed(name)
        return call_each(calls)

    world.buffer.call_each = die  # type: ignore[method-assign]


def test_a_worker_that_dies_between_payload_and_put_leaves_what_two_audits_find(
    world: World, any_server: AnyServer, payloads: PayloadSettings
) -> None:
    world.start().admit(1)
    (lease,) = world.lease(1)
    with Buffer.connect(any_server.url, world.buffer.run, payloads=payloads) as worker:
        worker.put([])
        worker._epoch_floors("math")
        die_before(World(worker), "put")
        with pytest.raises(Killed):
            worker.put([result(lease)])
    assert len(stored(world)) == 1
    world.collect_without_check()
    assert len(stored(world)) == 1, "its lease is held, so a put may come"
    world.run_out([lease])
    world.buffer.reap("math")
    audit = Audit(world.buffer)
    run_pass(audit, 0.0)
    assert len(stored(world)) == 1, "one pass may have asked a primary that was cut off"
    run_pass(audit, AUDIT_PAUSE_S / 2)
    assert len(stored(world)) == 1, "passes are apart"
    run_pass(audit, AUDIT_PAUSE_S)
    assert not stored(world)
    assert world.put(world.lease(1)) == [PutOutcome.COMPLETED]
    world.check()


def run_pass(audit: Audit, now_s: float) -> None:
    audit.step(now_s)
    while audit.is_at_work:
        audit.step(now_s)


def test_an_audit_of_live_payloads_removes_none(world: World) -> None:
    world.start(math={"batch_groups": 1, "max_uses": 2, "max_staleness": 8})
    put_large(world, 3)
    world.train(1, math=1)
    before = stored(world)
    world.collect()
    assert stored(world) == before != set()


def test_an_audit_passes_over_files_that_are_not_payloads(any_server: AnyServer, run_name: str, tmp_path: Path) -> None:
    payloads = PayloadSettings(url=str(tmp_path), min_bytes=MOST_INLINE_BYTES + 1)
    with Buffer.connect(any_server.url, run_name, payloads=payloads) as buffer:
        world = World(buffer)
        put_large(world.start())
        (folder,) = tmp_path.glob("*/*/math")
        strange = [folder / name for name in ("1.a-b-c", "1.", "x.a-b", "1.a", "notes.txt", "1.-", "é.a-b")]
        for path in strange:
            path.write_text("not rollq's")
        world.collect()
        assert all(path.exists() for path in strange)


def test_a_collector_that_dies_is_followed_by_another(world: World) -> None:
    put_large(world.start(), 2)
    drop_by_checkpoint(world)
    (name, _) = sorted(stored(world))
    world.buffer.payloads.remove([name])  # it died before it noted that
    assert world.buffer.collect("math") == 2
    assert not stored(world)
    assert world.buffer.collect("math") == 0


def test_nothing_is_collected_while_the_buffer_is_saved(world: World, tmp_path: Path) -> None:
    put_large(world.start(), 3)
    world.admit(1)
    (lease,) = world.lease(1)
    collected: list[int] = []

    def meanwhile(done: int, _: int) -> None:
        world.buffer.put([result(lease), result(lease, "z" * 50_000)])
        collected.append(world.buffer.collect("math"))
        assert not world.buffer.find_orphans(sorted(stored(world)))

    world.buffer.save(tmp_path / "saved", report=meanwhile)
    assert set(collected) == {0}
    assert world.buffer.collect("math") > 0
    world.check()


@pytest.mark.parametrize("back", [False, True])
def test_a_saved_buffer_is_restored_wherever_its_payloads_are_to_be(
    world: World, any_server: AnyServer, payloads: PayloadSettings, tmp_path: Path, back: bool
) -> None:
    """From away to the servers, and from away to away."""
    put_large(world.start(), 2)
    world.train(1)
    put_large(world, 2)
    world.buffer.save(tmp_path / "saved")
    given = payloads if back else PayloadSettings()
    with Buffer.connect(any_server.url, f"{world.buffer.run}-again", payloads=given) as buffer:
        again = World(buffer)
        buffer.restore(tmp_path / "saved")
        buffer.check_payloads()
        again.check()
        again.begin(1, launch_id="again")
        found = buffer.fetch(again.claim(2).groups)
        assert [group.samples[0].text for group in found] == [LARGE, LARGE]
        again.collect()
    assert len(stored(world)) == 4, "those of the first run stay"


def test_a_saver_holds_the_buffer_again_after_each_portion_of_large_payloads(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all payloads of a trip may take longer than the buffer is held."""
    monkeypatch.setattr(saving, "CHUNK_BYTES", 5 * len(LARGE) // 2)
    put_large(world.start(), 7)
    done: list[str] = []
    read, call_all = world.buffer.read_payloads, world.buffer.call_all

    def note_read(task: str, named: Mapping[int, str]) -> dict[int, bytes]:
        done.append(f"read {len(named)}")
        return read(task, named)

    def note_hold(calls: Sequence[Call]) -> list[object]:
        done.extend("hold" for call in calls if call[0] == "hold_for_saving")
        return call_all(calls)

    monkeypatch.setattr(world.buffer, "read_payloads", note_read)
    monkeypatch.setattr(world.buffer, "call_all", note_hold)
    world.buffer.save(tmp_path / "saved")
    assert done == ["hold", "read 2", "hold", "read 2", "hold", "read 2", "hold", "read 1", "hold", "hold"]


def test_a_restore_that_died_is_repeated_with_the_same_store(
    world: World, any_server: AnyServer, payloads: PayloadSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_large(world.start(), 2)
    world.buffer.save(tmp_path / "saved")
    run = f"{world.buffer.run}-again"
    with Buffer.connect(any_server.url, run, payloads=payloads) as buffer, monkeypatch.context() as patch:
        patch.setattr(Buffer, "_restore_task", lambda *_: die_here())
        with pytest.raises(Killed):
            buffer.restore(tmp_path / "saved")
    if payloads.url:
        with (
            Buffer.connect(any_server.url, run) as buffer,
            pytest.raises(RunMismatch, match=r"was with payloads\.url: repeat it that way"),
        ):
            buffer.restore(tmp_path / "saved")
    with Buffer.connect(any_server.url, run, payloads=payloads) as buffer:
        buffer.restore(tmp_path / "saved")
        World(buffer).check()


def test_a_payload_that_is_gone_is_a_corrupt_group_and_costs_no_role(world: World) -> None:
    put_large(world.start(), 2)
    claimed = world.claim(1)
    world.buffer.payloads.remove(sorted(stored(world)))
    assert world.buffer.sizes_bytes(claimed.groups) == [0, 0]
    with pytest.raises(CorruptGroup, match="group 1 of task 'math': its samples are no longer in the store"):
        world.buffer.fetch(claimed.groups)
    world.buffer.release(world.held, 1, "return", claim_round=claimed.claim_round, bad={"math": [1, 2]})
    assert world.statuses() == {"failed": 2}
    world.collect_without_check()


@pytest.fixture
def in_folder(server_url: str, run_name: str, tmp_path: Path) -> Iterator[World]:
    """A world that gives up at once where its folder for payloads is away."""
    payloads = PayloadSettings(url=str(tmp_path / "shared"), min_bytes=MOST_INLINE_BYTES + 1)
    (tmp_path / "shared").mkdir()
    with Buffer.connect(server_url, run_name, patience=IMPATIENT, payloads=payloads) as buffer:
        yield World(buffer)


def test_a_folder_that_is_not_mounted_is_away_and_its_payloads_are_not_gone(in_folder: World, tmp_path: Path) -> None:
    put_large(in_folder.start(math={"batch_groups": 1}))
    groups = in_folder.claim(1, math=1).groups
    in_folder.admit(1)
    (lease,) = in_folder.lease(1)
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    (tmp_path / "shared").mkdir()  # as a mount point is when nothing is mounted
    for call in (in_folder.buffer.fetch, in_folder.buffer.sizes_bytes):
        with pytest.raises(ServerUnavailable, match=r"payloads\.url = .*all files of this run"):
            call(groups)
    with pytest.raises(ServerUnavailable, match="all files of this run"):
        in_folder.buffer.put([result(lease)])
    shutil.rmtree(tmp_path / "shared")
    (tmp_path / "elsewhere").rename(tmp_path / "shared")
    assert in_folder.buffer.put([result(lease)]) == [PutOutcome.COMPLETED]
    assert in_folder.buffer.fetch(groups)[0].samples[0].text == LARGE
    in_folder.check()


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_is_not_mounted_gets_no_files(in_folder: World, tmp_path: Path) -> None:
    """They would lie hidden beneath the file system that is mounted later, and take this machine's disk."""
    in_folder.start().admit(1)
    (lease,) = in_folder.lease(1)
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    (tmp_path / "shared").mkdir()
    for _ in range(3):
        with pytest.raises(ServerUnavailable, match="all files of this run"):
            in_folder.buffer.put([result(lease)])
    assert not list((tmp_path / "shared").iterdir())


def test_a_file_that_is_written_as_its_folder_goes_is_withdrawn(
    in_folder: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a worker is frozen while it writes, and its run is deleted meanwhile."""
    in_folder.start().admit(1)
    (lease,) = in_folder.lease(1)
    put = files.Folder.put

    def put_late(self: files.Folder, name: str, value: bytes | Pieces) -> None:
        shutil.rmtree(tmp_path / "shared", ignore_errors=True)
        put(self, name, value)

    monkeypatch.setattr(files.Folder, "put", put_late)
    with pytest.raises(ServerUnavailable, match="all files of this run"):
        in_folder.buffer.put([result(lease)])
    assert not files_in(tmp_path / "shared")


def let_go(world: World) -> None:
    """As if its roles had ended long ago."""
    world.buffer.client.hset(world.buffer.keys.trainer, "deadline_ms", 1)
    world.buffer.client.hset(task_keys(world.buffer.run, "math").clock, "reaped_ms", 1)


def test_a_worker_that_wakes_after_its_run_was_deleted_leaves_no_payload(
    world: World, any_server: AnyServer, fresh_server: EmbeddedServer, run_name: str, payloads: PayloadSettings
) -> None:
    """Nothing looks for payloads of a run that is gone. The error names the run, not the place of its payloads."""
    world.start().admit(2)
    first, second = world.lease(2)
    let_go(world)
    with (
        Buffer.connect(any_server.url, run_name, payloads=payloads) as operator,
        closing(open_queue(fresh_server.url, run_name).connection) as tickets,
    ):
        operator.delete_run(Queue("tickets", connection=tickets))
    for lease in (first, second):
        with pytest.raises(StoreLost):
            world.buffer.put([result(lease)])
    assert not stored(world)


def test_a_run_that_is_deleted_in_the_middle_of_a_put_is_not_waited_for(
    in_folder: World, tmp_path: Path, fresh_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_folder.start().admit(2)
    leases = in_folder.lease(2)
    put, written = files.Folder.put, list[str]()

    def put_and_delete(self: files.Folder, name: str, value: bytes | Pieces) -> None:
        put(self, name, value)
        if not written:
            written.append(name)
            let_go(in_folder)
            with closing(open_queue(fresh_server.url, in_folder.buffer.run).connection) as tickets:
                in_folder.buffer.delete_run(Queue("tickets", connection=tickets))

    monkeypatch.setattr(files.Folder, "put", put_and_delete)
    monkeypatch.setattr(in_folder.buffer, "_patience", Patience(unanswered_s=600.0, unready_s=600.0))
    with pytest.raises(StoreLost, match="is no longer in this store"):
        in_folder.buffer.put([result(lease) for lease in leases])
    assert not files_in(tmp_path / "shared")


def test_the_marker_of_a_run_is_not_the_folder_of_a_task() -> None:
    with pytest.raises(ConfigError, match="task name"):
        check_name("task", MARKER)


@pytest.mark.parametrize("name", [".", ".."])
def test_the_name_of_a_run_leads_out_of_no_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="not dots alone"):
        check_name("run", name)


def test_a_write_that_failed_leaves_no_file(in_folder: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try has a file of another name: those of a full disk would take the room that becomes free."""
    in_folder.start().admit(1)
    (lease,) = in_folder.lease(1)
    write = files._write

    def write_half(path: str, value: bytes | Pieces) -> None:
        write(path, bytes(value)[: len(value) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(files, "_write", write_half)
        with pytest.raises(ServerUnavailable, match="No space left on device"):
            in_folder.buffer.put([result(lease)])
    assert [path.name for path in (tmp_path / "shared").rglob("*") if path.is_file()] == [MARKER]
    assert in_folder.buffer.put([result(lease)]) == [PutOutcome.COMPLETED]


def test_a_lease_of_a_group_whose_payload_is_gone_begins_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start(math={"batch_groups": 1, "max_staleness": 1})
    put_large(world, 2)
    world.train(1, math=1)
    world.admit(1)
    (lease,) = world.lease(1)
    world.buffer.put([GroupResult(lease, (make_sample(0, text=LARGE), make_sample(1, text="young")))])
    world.train(2, math=1)
    world.buffer.expire("math")
    world.buffer.payloads.remove(sorted(stored(world)))
    world.buffer.recycle("math", epoch=world.held.epoch, target=100, limit=100, statuses=[Status.EXPIRED])
    (again,) = [each for each in world.lease(10) if each.group_id == lease.group_id]
    assert {sample.status for sample in again.samples} == {SampleStatus.PENDING}
    assert "the frame of its samples is gone from the store" in caplog.text


def test_many_workers_and_a_collector_at_once_lose_nothing(
    world: World, any_server: AnyServer, payloads: PayloadSettings
) -> None:
    world.start(math={"batch_groups": 20, "max_staleness": 9})
    stop = threading.Event()

    def collect() -> None:
        audit = Audit(world.buffer)
        now_s = 0.0
        while not stop.is_set():
            world.buffer.collect("math")
            run_pass(audit, now_s := now_s + AUDIT_PAUSE_S)

    collector = threading.Thread(target=collect)
    collector.start()
    try:
        for step in (1, 2, 3):
            world.admit(20)
            leases = world.lease(20)
            workers = [
                threading.Thread(target=partial(world.buffer.put, [result(lease) for lease in leases[start::4]]))
                for start in range(4)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            found = world.buffer.fetch(world.claim(step, math=20).groups)
            assert {group.samples[0].text for group in found} == {LARGE}
            world.train(step, math=20)
            world.buffer.checkpoint(world.held, step)
    finally:
        stop.set()
        collector.join()
    world.collect()
    assert not stored(world)
    world.check()


def test_filtered_groups_make_those_on_their_way_no_larger(server_url: str, run_name: str) -> None:
    with Buffer.connect(server_url, run_name, payloads=PayloadSettings(max_buffer_bytes=10**9)) as buffer:
        world = World(buffer).start()
        world.admit(30)
        buffer.put([replace(result(lease), filtered=index > 0) for index, lease in enumerate(world.lease(20))])
        counts = buffer.counts("math")
        assert world.statuses() == {"pending": 10, "completed": 1, "filtered": 19}
        assert counts.expected_bytes == pytest.approx(1.5 * counts.progress["bytes"])
        assert buffer.fullness().share == pytest.approx(counts.expected_bytes / 10**9)


# -- at start ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_refused(server_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"payloads.url = '.*/nowhere': there is no such folder on this machine"):
        Buffer.connect(server_url, "run", payloads=PayloadSettings(url=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"payloads.url = '.*': is neither s3://bucket/prefix nor the absolute"):
        Buffer.connect(server_url, "run", payloads=PayloadSettings(url="relative"))


def test_another_folder_than_that_of_the_run_is_refused(server_url: str, run_name: str, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    mine.mkdir()
    other.mkdir()
    with Buffer.connect(server_url, run_name, payloads=PayloadSettings(url=str(mine))) as buffer:
        buffer.create_run()
        buffer.create_run()
    with (
        Buffer.connect(server_url, run_name, payloads=PayloadSettings(url=str(other))) as buffer,
        pytest.raises(ConfigError, match="has nothing of this run, which was created with another folder"),
    ):
        buffer.create_run()
    with (
        Buffer.connect(server_url, run_name) as buffer,
        pytest.raises(ConfigError, match=r"keeps payloads outside its servers: set payloads\.url"),
    ):
        buffer.create_run()


def test_a_store_for_a_run_that_began_without_one_is_refused(server_url: str, run_name: str, tmp_path: Path) -> None:
    with Buffer.connect(server_url, run_name) as buffer:
        buffer.create_run()
    with (
        Buffer.connect(server_url, run_name, payloads=PayloadSettings(url=str(tmp_path))) as buffer,
        pytest.raises(ConfigError, match=r"was created without payloads\.url"),
    ):
        buffer.create_run()


def test_a_store_for_a_run_that_is_not_there_is_not_blamed(server_url: str, run_name: str, tmp_path: Path) -> None:
    with (
        Buffer.connect(server_url, run_name, payloads=PayloadSettings(url=str(tmp_path))) as buffer,
        pytest.raises(StoreLost, match="is not in this store"),
    ):
        buffer.check_payloads()


def test_a_bucket_without_rights_is_refused(
    server_url: str, run_name: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}.items():
        monkeypatch.setenv(name, value)
    with (
        Buffer.connect(server_url, run_name, payloads=PayloadSettings(url=s3.url)) as buffer,
        pytest.raises(ServerRefused, match=r"payloads.url = 's3://.*give this role the right"),
    ):
        buffer.create_run()


def test_a_store_that_does_not_answer_is_named(
    server_url: str, run_name: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.environment, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    with (
        Buffer.connect(server_url, run_name, patience=IMPATIENT, payloads=PayloadSettings(url=s3.url)) as buffer,
        pytest.raises(ServerUnavailable, match=r"payloads.url = 's3://.*check that it answers"),
    ):
        buffer.create_run()


def test_a_bucket_without_a_key_is_refused_with_the_names_of_its_variables(
    server_url: str, run_name: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3.environment, "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with (
        Buffer.connect(server_url, run_name, patience=IMPATIENT, payloads=PayloadSettings(url=s3.url)) as buffer,
        pytest.raises(ServerUnavailable, match=r"payloads.url = 's3://.*set AWS_ACCESS_KEY_ID and"),
    ):
        buffer.create_run()
