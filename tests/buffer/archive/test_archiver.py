"""Groups that are trained or dropped reach the archive before they leave the buffer, and none is there twice."""

import errno
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

from rollq.buffer.archive.archiver import Archiver, file_name
from rollq.buffer.archive.reader import Archive
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.archiving import Portion, StoredGroup
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.errors import ConfigError
from rollq.buffer.store.connection import Patience
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Prompt
from support.any_server import AnyServer
from support.buffer_run import World, payloads_in
from support.waiting import wait_until

pytestmark = pytest.mark.any_server

NEVER = threading.Event()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "archive").mkdir()
    return tmp_path / "archive"


def archive(world: World, folder: Path, **options: float) -> int:
    """Archive all that has left; returns how many groups that were."""
    archiver = Archiver(world.buffer, str(folder), **{"wait_s": 0.0, **options})
    total = 0
    while count := archiver.archive_once(NEVER):
        total += count
    return total


def rows_in(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.rglob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def train(world: World, step: int) -> None:
    world.complete(2)
    world.train(step)


def test_trained_groups_leave_only_once_they_are_in_the_archive(world: World, folder: Path) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    assert archive(world, folder) == 0, "a trainer may return to the step"
    world.buffer.checkpoint(world.held, 1)
    assert world.statuses() == {"leaving": 2}
    world.check()
    assert archive(world, folder) == 2
    assert world.statuses() == {}
    assert world.buffer.counts("math").dropped == {"trained": 2}
    world.check()
    world.collect()
    rows = rows_in(folder)
    assert [(row["group_id"], row["sample"], row["outcome"], row["step"], row["position"]) for row in rows] == [
        (1, 0, "trained", 1, 0), (1, 1, "trained", 1, 0), (2, 0, "trained", 1, 1), (2, 1, "trained", 1, 1),
    ]  # fmt: skip
    assert rows[0]["response_ids"] == [[0, 1, 2]]
    assert rows[0]["versions"] == [[{"epoch": 1, "version": 0, "tokens": 3}]]
    assert all(row["committed_at"] >= row["claimed_at"] >= row["put_at"] >= row["admitted_at"] for row in rows)
    assert world.buffer.archive_state("math").groups == 2


def test_every_way_to_leave_is_an_outcome(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "audit_groups": 0, "tail_batch_trigger_size": -1, "max_staleness": 0})
    world.admit(1)
    world.put(world.lease(1), reward=None, status="f")
    world.complete(2)
    claimed = world.claim(1)
    world.buffer.release(world.held, 1, "drop", claim_round=claimed.claim_round)
    world.complete(3)
    world.train(1)
    world.buffer.expire("math")
    world.check()
    archive(world, folder)
    outcomes = Counter(row["outcome"] for row in rows_in(folder) if row["sample"] == 0)
    assert outcomes == {"failed": 1, "released": 2, "expired": 1}
    assert world.buffer.counts("math").dropped == outcomes


def test_what_is_kept_for_audit_is_archived_when_the_run_is_over(world: World, folder: Path) -> None:
    world.start(math={"archive": True})
    world.admit(1)
    world.put(world.lease(1), reward=None, status="f")
    assert archive(world, folder) == 0
    Archiver(world.buffer, str(folder)).finish(NEVER)
    assert world.statuses() == {}
    assert [row["outcome"] for row in rows_in(folder)] == ["failed", "failed"]
    world.check()


def test_without_an_archive_nothing_waits(world: World) -> None:
    world.start()
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    assert world.statuses() == {}


class Killed(Exception):
    pass


@pytest.mark.parametrize("point", ["taken", "encoded", "written"])
def test_an_archiver_that_dies_leaves_nothing_twice(
    world: World, folder: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    archiver = Archiver(world.buffer, str(folder), wait_s=0.0)

    def die(*_: object) -> Any:
        raise Killed

    def write_and_die(*arguments: Any) -> None:
        Archiver._put(archiver, *arguments)
        raise Killed

    match point:
        case "taken":
            monkeypatch.setattr(archiver, "_encode", die)
        case "encoded":
            monkeypatch.setattr(archiver, "_put", die)
        case "written":
            monkeypatch.setattr(archiver, "_put", write_and_die)
    with pytest.raises(Killed):
        archiver.archive_once(NEVER)
    assert world.statuses() == {"leaving": 2}
    before = {file: file.read_bytes() for file in folder.rglob("*.parquet")}
    # groups that leave meanwhile belong to the next portion
    train(world, 2)
    world.buffer.checkpoint(world.held, 2)
    monkeypatch.setattr("rollq.buffer.calls.archiving.ARCHIVER_LEASE_MS", 0)
    assert archive(world, folder) == 4
    assert all(file.read_bytes() == content for file, content in before.items()), "the same file again"
    assert Counter(row["group_id"] for row in rows_in(folder)) == {1: 2, 2: 2, 3: 2, 4: 2}
    world.check()


def test_a_second_archiver_waits_while_the_first_is_at_work(world: World, folder: Path) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    first = world.buffer.take_to_archive("math", "first", most=1000, wait_s=0)
    assert first == Portion("math", 1, 1, (1, 2))
    assert world.buffer.take_to_archive("math", "second", most=1000, wait_s=0) is None
    assert world.buffer.take_to_archive("math", "first", most=1000, wait_s=0) == first


def test_an_archiver_that_was_held_up_leaves_the_file_of_another(
    world: World, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    slow = Archiver(world.buffer, str(folder), wait_s=0.0)
    read = world.buffer.read_stored

    def read_late(task: str, ids: Sequence[int]) -> Iterator[StoredGroup]:
        monkeypatch.setattr(world.buffer, "read_stored", read)
        monkeypatch.setattr("rollq.buffer.calls.archiving.ARCHIVER_LEASE_MS", 0)
        assert archive(world, folder) == 2
        return read(task, ids)

    monkeypatch.setattr(world.buffer, "read_stored", read_late)
    assert slow.archive_once(NEVER) == 0
    assert Counter(row["group_id"] for row in rows_in(folder)) == {1: 2, 2: 2}


def test_a_late_copy_of_a_call_forgets_nothing(world: World, folder: Path) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    first = world.buffer.take_to_archive("math", "one", most=1, wait_s=0)
    assert first is not None
    world.buffer.forget_archived(first)
    second = world.buffer.take_to_archive("math", "one", most=1, wait_s=0)
    assert world.buffer.forget_archived(first)
    assert world.buffer.take_to_archive("math", "one", most=1, wait_s=0) == second
    assert world.statuses() == {"leaving": 1}


def test_groups_that_were_dropped_wait_for_others_of_their_step(world: World) -> None:
    world.start(math={"archive": True, "audit_groups": 0})
    world.admit(1)
    world.put(world.lease(1), reward=None, status="f")
    assert world.buffer.take_to_archive("math", "one", most=1000, wait_s=3600) is None
    train(world, 1)
    found = world.buffer.take_to_archive("math", "one", most=1000, wait_s=3600)
    assert found is not None
    assert (found.step, found.ids) == (1, (1,)), "the step is over"


def test_a_claim_waits_when_nothing_is_archived(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "max_uncheckpointed_steps": 2})
    for step in (1, 2, 3):
        train(world, step)
        world.buffer.checkpoint(world.held, step)
    world.complete(2)
    assert world.buffer.claim(world.held, 4, {"math": 2}) == Shortfall(
        4, ready={"math": 2}, wanted={"math": 2}, unarchived={"math": 6}
    )
    archive(world, folder)
    world.train(4)


def test_no_task_is_claimed_while_another_one_waits_for_the_archive(world: World, folder: Path) -> None:
    rules: dict[str, object] = {"max_uncheckpointed_steps": 1}
    world.start(math={"archive": True, **rules}, code=rules)
    for step in (1, 2):
        world.complete(2)
        world.complete(2, "code")
        world.train(step, math=2, code=2)
        world.buffer.checkpoint(world.held, step)
    world.complete(2)
    world.complete(2, "code")
    lacking = world.buffer.claim(world.held, 3, {"math": 2, "code": 2})
    assert lacking == Shortfall(3, ready={"math": 2}, wanted={"math": 2}, unarchived={"math": 4})
    assert world.statuses("code") == {"completed": 2}
    archive(world, folder)
    world.train(3, math=2, code=2)


@pytest.mark.parametrize("resume", ["durable", "fresh"])
def test_a_claim_after_a_checkpoint_does_not_wait_for_the_archiver(world: World, resume: str) -> None:
    world.start(math={"archive": True, "max_uncheckpointed_steps": 2, "resume": resume})
    for step in (1, 2):
        train(world, step)
    world.buffer.checkpoint(world.held, 2)
    train(world, 3)


def test_nothing_new_is_admitted_when_too_much_waits(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "max_uncheckpointed_steps": 1, "audit_groups": 0})
    world.admit(3)
    world.put(world.lease(3), reward=None, status="f")
    assert world.admit(1) == 0
    archive(world, folder)
    assert world.admit(1) == 1


def test_batches_that_were_trained_before_there_was_an_archive_have_their_step(world: World, folder: Path) -> None:
    world.start()
    for step in (1, 2):
        train(world, step)
    world.buffer.change_rules("math", {"archive": "true"})
    train(world, 3)
    world.buffer.checkpoint(world.held, 3)
    archive(world, folder)
    found = Counter((row["step"], row["outcome"], row["position"] is None) for row in rows_in(folder))
    assert found == {(1, "trained", True): 4, (2, "trained", True): 4, (3, "trained", False): 4}
    held = Archive(str(folder))
    assert [len(held.batch(step, names)) for step, names in held.steps().items()] == [0, 0, 2]


def test_an_archive_that_is_turned_off_gets_what_had_left_before(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "max_uncheckpointed_steps": 1})
    for step in (1, 2):
        train(world, step)
        world.buffer.checkpoint(world.held, step)
    world.complete(2)
    assert isinstance(world.buffer.claim(world.held, 3, {"math": 2}), Shortfall)
    world.buffer.change_rules("math", {"archive": "false"})
    world.train(3)
    world.buffer.checkpoint(world.held, 3)
    assert world.statuses() == {"leaving": 4}
    assert world.buffer.counts("math").dropped == {"trained": 2}
    Archiver(world.buffer, str(folder)).finish(NEVER)
    assert world.statuses() == {}
    assert {row["step"] for row in rows_in(folder)} == {1, 2}
    world.check()


def test_evaluations_wait_for_the_archive_and_hold_up_nothing(world: World, folder: Path) -> None:
    world.start(math={}, held_out={"kind": "eval", "archive": True, "max_uncheckpointed_steps": 1})
    for version in range(3):
        state = world.buffer.open_batch("held_out", f"{version}/held_out", "eval", step=version)
        world.buffer.fill_batch("held_out", state.handle, 0, [Prompt("?")] * 4, last=True)
        world.put(world.lease(4, "held_out"))
        world.buffer.close_evaluation("held_out", state.handle)
        train(world, version + 1)
    assert world.statuses("held_out") == {"leaving": 12}
    assert archive(world, folder) == 12
    assert Counter(row["outcome"] for row in rows_in(folder)) == {"evaluated": 24}


def test_a_run_that_resumes_fresh_is_archived_at_its_commits(world: World, folder: Path) -> None:
    world.start(math={"archive": True, "resume": "fresh"})
    train(world, 1)
    assert world.statuses() == {"leaving": 2}
    archive(world, folder)
    assert {(row["step"], row["outcome"]) for row in rows_in(folder)} == {(1, "trained")}
    world.check()


def test_nothing_leaves_while_the_buffer_is_saved(world: World, folder: Path, tmp_path: Path) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    portion = world.buffer.take_to_archive("math", "one", most=1000, wait_s=0)
    assert portion is not None
    world.buffer._hold(["math"], "save", 60_000)
    assert not world.buffer.forget_archived(portion)
    assert world.statuses() == {"leaving": 2}
    world.buffer._hold(["math"], "save", 0)
    assert world.buffer.forget_archived(portion)
    assert world.statuses() == {}


def test_a_snapshot_has_what_waits_for_the_archive(
    world: World, folder: Path, tmp_path: Path, any_server: AnyServer, run_name: str
) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    world.buffer.save(tmp_path / "saved")
    with Buffer.connect(any_server.url, f"{run_name}-fork", payloads=payloads_in(tmp_path / "other")) as buffer:
        buffer.restore(tmp_path / "saved")
        fork = World(buffer)
        assert fork.statuses() == {"leaving": 2}
        assert archive(fork, folder) == 2
        fork.check()
    assert world.statuses() == {"leaving": 2}
    assert {row["run"] for row in rows_in(folder)} == {f"{run_name}-fork"}


def test_another_folder_is_refused(world: World, folder: Path, tmp_path: Path) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    archive(world, folder)
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="has nothing of this run"):
        Archiver(world.buffer, str(tmp_path / "other"))


@pytest.mark.parametrize("is_full", [False, True], ids=["away", "full"])
def test_an_archiver_waits_for_its_folder_and_says_so(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    world.buffer._patience = Patience(unanswered_s=0.0)
    archiver, stop = Archiver(world.buffer, str(folder), wait_s=0.0), threading.Event()

    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def is_waiting() -> bool:
        return ("No space left" if is_full else "it has lost all files of this run") in trouble()

    def trouble() -> str:
        return world.buffer.archive_state("math").trouble

    with monkeypatch.context() as patch:
        if is_full:
            patch.setattr("rollq.buffer.payloads.folders_and_buckets._write", fill)
        else:
            folder.rename(folder.with_name("elsewhere"))
            folder.mkdir()
        thread = threading.Thread(target=archiver.run, args=[stop])
        thread.start()
        try:
            wait_until(is_waiting, otherwise=trouble)
        finally:
            if not is_full:
                folder.rmdir()
                folder.with_name("elsewhere").rename(folder)
            patch.undo()
            wait_until(lambda: not world.statuses())
            stop.set()
            thread.join()
    assert trouble() == ""
    assert len([message for message in caplog.messages if message.endswith("waiting for it")]) == 1
    assert [row["group_id"] for row in rows_in(folder)] == [1, 1, 2, 2]


def test_an_archiver_that_waits_for_its_folder_can_be_stopped(world: World, folder: Path) -> None:
    world.start(math={"archive": True})
    train(world, 1)
    world.buffer.checkpoint(world.held, 1)
    archiver = Archiver(world.buffer, str(folder), wait_s=0.0)
    folder.rename(folder.with_name("elsewhere"))
    folder.mkdir()
    thread = threading.Thread(target=archiver.run, args=[world.buffer.closed])
    thread.start()
    wait_until(lambda: world.buffer.archive_state("math").trouble != "")
    world.buffer.closed.set()
    thread.join()
    world.buffer.closed.clear()
    assert world.statuses() == {"leaving": 2}


def test_a_group_that_somebody_has_damaged_does_not_hold_up_the_others(
    world: World, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world.start(math={"archive": True, "batch_groups": 100})
    world.complete(1)
    keys, names = task_keys(world.buffer.run, "math"), sorted(world.buffer.inspect("math", 1))
    damage: list[tuple[str, str | None]] = [(name, value) for name in names for value in (None, "abc", "9" * 20)]
    world.complete(len(damage))
    world.train(1, math=1 + len(damage))
    world.buffer.checkpoint(world.held, 1)
    for group_id, (name, value) in enumerate(damage, start=2):
        if value is None:
            world.buffer.client.hdel(keys.group(group_id), name)
        else:
            world.buffer.client.hset(keys.group(group_id), name, value)
    archive(world, folder)
    assert world.statuses() == {}
    rows = rows_in(folder)
    assert {row["group_id"] for row in rows} == set(range(1, 2 + len(damage)))
    lost = {row["group_id"]: row["reason"] for row in rows if row["outcome"] == "damaged"}
    assert {damage[group_id - 2][0] for group_id in lost} >= {"arrival", "letters", "tries"}
    assert 1 not in lost
    without = {damage[row["group_id"] - 2][0] for row in rows if row["leases"] is None and row["outcome"] != "damaged"}
    assert without == {"attempt", "leased", "put_ms", "status"}, "leases are for people: the samples are kept"
    assert len([text for text in caplog.messages if "archived without its leases" in text]) >= len(without)
    assert all("it was modified in the buffer" in reason for reason in lost.values())
    assert len([text for text in caplog.messages if "it was modified in the buffer" in text]) == len(lost)


def test_files_are_named_by_task_step_and_number() -> None:
    assert file_name(Portion("math", 7, 12, (1,))) == "math/step-00000012-000007.parquet"
