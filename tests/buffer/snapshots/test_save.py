import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load_file

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.batches import BatchState
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import ConfigError, RunMismatch, SnapshotError
from rollq.buffer.payloads.interface import PayloadName
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.snapshots import save as saving
from rollq.buffer.snapshots.folder import INDEX, SavedGroup, read_index
from rollq.buffer.snapshots.save import as_indexed
from rollq.buffer.store.embedded_server import EmbeddedServer
from rollq.buffer.store.keys import SCHEMA_VERSION, task_keys
from rollq.buffer.values.rollouts import NO_VERSION, ArrayRef, FinishedGroup, GroupResult, PipelineOutput, Prompt
from rollq.buffer.values.step_rows import StepRows
from rollq.buffer.wire.arrays import load_array, store_array
from rollq.buffer.wire.frame_decoding import decode_samples
from rollq.buffer.wire.group_fields import encode_payload
from rollq.buffer.wire.prompts import decode_prompt
from support.any_server import AnyServer
from support.buffer_run import World, make_sample, payloads_of, set_clock
from support.finished_groups import finished_groups, finished_sample
from support.waiting import PATIENCE_S

Dump = dict[str, Any]


@pytest.fixture
def world(any_server: AnyServer, run_name: str) -> Iterator[World]:
    """A run that has not begun yet."""
    with Buffer.connect(any_server.url, run_name) as buffer:
        yield World(buffer)


@pytest.fixture
def elsewhere(fresh_server: EmbeddedServer, run_name: str) -> Iterator[World]:
    """The same run on another server, which is empty."""
    with Buffer.connect(fresh_server.url, run_name) as buffer:
        yield World(buffer)


def dump(buffer: Buffer, task: str = "math") -> Dump:
    """Everything that is stored of a task, by the last part of its key, but for the mark of a cluster, and garbage.

    A payload that is away is stored under its group and its lease; its suffix means nothing.
    """
    client: Any = buffer.client
    prefix = task_keys(buffer.run, task).clock.removesuffix("clock")
    read = {
        b"hash": client.hgetall,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"string": client.get,
    }
    left_out = {f"{prefix}{name}".encode() for name in ("mark", "garbage", "shared")}
    keys = set(client.scan_iter(match=prefix.replace("[", "[[]") + "*")) - left_out
    found = {key.decode().removeprefix(prefix): read[client.type(key)](key) for key in keys}
    named = payloads_of(buffer, task)
    away = {group_id: name for group_id, text in named.items() if (name := PayloadName.parse(task, text))}
    for group_id, payload in buffer.read_payloads(task, {group_id: named[group_id] for group_id in away}).items():
        nonce = away[group_id].leaf.partition("-")[0]
        found[f"payload:{group_id}:{nonce}"] = payload
        found[f"group:{group_id}"][b"payload"] = nonce.encode()
    return found


def groups_in(found: Dump, status: str) -> list[int]:
    """Ids in the order of the status."""
    return [int(entry[0]) for entry in found.get(status, [])]


def fill(world: World) -> None:
    """Groups in every status that a task without batches has, some of them with partial samples."""
    known = [(Prompt("of a known row", row=7), 1)]
    world.buffer.admit("math", known, epoch=world.held.epoch, cursor=0, target=100, step=1)
    world.put(world.lease(1))
    world.complete(8)
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    world.train(2)
    world.claim(3)
    world.admit(9)
    partial, failed, filtered, stale, late, dead, held, *rest = world.lease(8)
    half = (make_sample(2, status="a"), make_sample(2))
    world.buffer.put([GroupResult(partial, half)])
    world.put([failed], status="f")
    world.buffer.put([GroupResult(filtered, (make_sample(2),) * 2, filtered=True)])
    world.put([stale], version=-1 + 1)
    world.put([late], version=1)
    world.buffer.hand_back([dead], error="engine", counted=True)
    assert held
    assert rest
    world.buffer.publish(world.held, 3, uri="file:///weights/3", digest="digest-3")


def lasting(found: Dump) -> Dump:
    """What of a dump a restore brings back: not leases, nor sums for people. What was running is pending."""
    passing = ("clock", "running", "generating", "window", "timings", "grant", "suspects", "offers")
    kept = {name: value for name, value in found.items() if name.partition(":")[0] not in passing}
    pending = {int(group_id): score for group_id, score in found.get("pending", [])}
    for group_id in groups_in(found, "running"):
        group = kept[f"group:{group_id}"]
        group |= {b"status": b"pending", b"tries": str(int(group[b"tries"]) - 1).encode()}
        for gone in (b"nonce", b"worker", b"alone", b"confirmed", b"leased_ms", b"leased"):
            del group[gone]
        pending[group_id] = float((int(group[b"step"]) * 2 + int(group[b"eval"]) << 32) + int(group[b"arrival"]))
    return kept | {"pending": sorted(pending.items(), key=lambda entry: entry[1])}


RULES: dict[str, Any] = {"partial_rollout": True, "max_staleness": 2, "prompt_stats": True}


@pytest.mark.parametrize("order", ["staleness", "arrival"])
def test_xb16_a_restored_buffer_has_the_order_all_fields_and_all_counters(
    world: World, elsewhere: World, tmp_path: Path, order: str
) -> None:
    world.start(math=RULES | {"order": order}, code={})
    world.complete(3, "code")
    fill(world)
    before = {task: lasting(dump(world.buffer, task)) for task in ("math", "code")}
    assert {"archived", "claimed", "completed", "aborted", "failed", "filtered", "pending", "prompts"} <= before[
        "math"
    ].keys()

    saved = world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved", rules={"math": world.buffer.rules("math")})

    assert {task: lasting(dump(elsewhere.buffer, task)) for task in ("math", "code")} == before
    assert saved.resume_steps == (1, 2)
    elsewhere.check()
    world.check()


def test_inserted_groups_with_large_frames_come_back(world: World, elsewhere: World, tmp_path: Path) -> None:
    world.start(demos={"offline": True})
    samples = tuple([finished_sample(float(index), text="x" * 40_000) for index in range(2)])
    groups = [FinishedGroup(Prompt("large"), samples), *finished_groups(1)]
    world.buffer.insert("demos", groups, source="expert")
    world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.begin(0, launch_id="again")
    found = elsewhere.buffer.fetch(elsewhere.train(1, demos=2).groups)
    assert [[len(sample.text) for sample in group.samples] for group in found] == [[40_000] * 2, [0] * 2]
    elsewhere.check()


def test_xb16_batches_evaluations_and_groups_that_cool_come_back_too(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 5, "reuse_cooldown_steps": 1}, held_out={"kind": "eval"})
    world.complete(2)
    world.train(1)
    for task, kind in (("math", "train"), ("held_out", "eval")):
        batch = world.buffer.open_batch(task, "b", kind, step=2)  # type: ignore[arg-type]
        world.buffer.fill_batch(task, batch.handle, 0, [Prompt("a"), Prompt("b"), Prompt("c")], last=True)
        world.put(world.lease(2, task)[:1])
    before = {task: lasting(dump(world.buffer, task)) for task in ("math", "held_out")}
    assert {"gathered", "cooling", "batches"} <= before["math"].keys()
    assert {"gathered", "batches"} <= before["held_out"].keys()

    saved = world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved")

    assert {task: lasting(dump(elsewhere.buffer, task)) for task in ("math", "held_out")} == before
    assert saved.resume_steps == (0, 1)
    elsewhere.check()


def test_xb16_the_clock_comes_back_without_a_live_version_and_without_a_trainer(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start(math=RULES)
    fill(world)
    world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved")
    here, there = world.buffer.clock("math"), elsewhere.buffer.clock("math")
    assert (there.epoch, there.step, there.committed, there.claimed_step, there.checkpoint, there.history) == (
        here.epoch, here.step, here.committed, here.claimed_step, here.checkpoint, here.history
    )  # fmt: skip
    assert (there.floors, there.rules) == (here.floors, here.rules)
    assert there.version == NO_VERSION
    assert dump(elsewhere.buffer)["clock"][b"nonce"] == b""
    assert there.incarnation != here.incarnation
    assert elsewhere.buffer.live_model() is None
    assert elsewhere.begin(2, launch_id="after", trainer_id="somebody else").epoch == here.epoch + 1


def test_xb16_a_snapshot_is_json_and_safetensors_and_holds_no_pickle(world: World, tmp_path: Path) -> None:
    world.start()
    world.complete(2)
    world.buffer.save(tmp_path / "saved")
    files = sorted(path.relative_to(tmp_path / "saved").as_posix() for path in (tmp_path / "saved").rglob("*.*"))
    assert files == [INDEX, "task-math/frames-00000.safetensors", "task-math/groups-00000.jsonl"]
    lines = (tmp_path / "saved" / files[2]).read_bytes().splitlines()
    assert [orjson.loads(line)["id"] for line in lines] == [1, 2]
    frames = load_file(tmp_path / "saved" / files[1])
    assert frames.keys() == {"1/all", "2/all"}
    assert all(frame.dtype == np.uint8 for frame in frames.values())
    assert [sample.response_tokens for sample in decode_samples(frames["2/all"].tobytes())] == [3, 3]


def test_xb16_arrays_that_samples_only_refer_to_are_read_after_a_restore(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start(math={"group_size": 1}).admit(1)
    (lease,) = world.lease(1)
    routed = np.arange(3, dtype=np.uint8)
    sample = make_sample(0)
    segment = replace(sample.segments[0], arrays={"routed": store_array(tmp_path / "arrays", routed)})
    world.buffer.put([GroupResult(lease, (replace(sample, segments=(segment,)),))])
    world.buffer.save(tmp_path / "saved")

    elsewhere.buffer.restore(tmp_path / "saved", rules={"math": world.buffer.rules("math")})

    elsewhere.begin(0, launch_id="after the restore")
    (group,) = elsewhere.buffer.fetch(elsewhere.claim(1, math=1).groups)
    reference = group.samples[0].segments[0].arrays["routed"]
    assert isinstance(reference, ArrayRef)
    np.testing.assert_array_equal(load_array(reference), routed)


def test_xb16_restoring_into_a_run_that_exists_is_refused(world: World, tmp_path: Path) -> None:
    world.start()
    world.complete(2)
    world.buffer.save(tmp_path / "saved")
    before = dump(world.buffer)
    with pytest.raises(RunMismatch, match=r"exists here already.*another name"):
        world.buffer.restore(tmp_path / "saved")
    assert dump(world.buffer) == before


def test_xb16_restoring_under_other_rules_is_refused_naming_the_rule(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start()
    world.complete(2)
    world.buffer.save(tmp_path / "saved")
    asked = TaskRules(batch_groups=2, group_size=2, order="arrival")
    with pytest.raises(RunMismatch, match="'math' was saved with order = staleness, but the settings have arrival"):
        elsewhere.buffer.restore(tmp_path / "saved", rules={"math": asked})
    assert elsewhere.buffer.client.dbsize() == 0


def test_xb16_roles_with_other_rules_are_refused_after_a_restore(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start()
    world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved")
    with pytest.raises(RunMismatch, match="order = arrival, and the run has staleness"):
        elsewhere.buffer.register_task("math", TaskRules(batch_groups=2, group_size=2, order="arrival"))


def test_a_restored_run_may_have_another_name(world: World, tmp_path: Path) -> None:
    world.start()
    world.complete(2)
    world.buffer.save(tmp_path / "saved")
    with Buffer(world.buffer.servers, f"{world.buffer.run}-fork") as fork:
        fork.restore(tmp_path / "saved")
        there = World(fork)
        there.begin(0, launch_id="fork")
        with fork.events() as events:
            assert [group.group_id for group in there.claim(1).groups] == [1, 2]
            assert events.wait(PATIENCE_S)
    assert world.statuses() == {"completed": 2}


def test_numbers_by_step_come_back_in_any_number(world: World, elsewhere: World, tmp_path: Path) -> None:
    world.start()
    for step in range(1, 1202):
        world.buffer.report_trainer(world.held, {"step": step, "reward": step / 10_000, "loss": 1.0})
    world.buffer.report_evaluations(world.held, 0, {"held_out": 0.25})
    before = world.buffer.curves()
    world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved")
    assert elsewhere.buffer.curves() == before
    elsewhere.begin(0, launch_id="there")
    assert elsewhere.buffer.curves() == StepRows((), before.evaluations)


def test_xb16_a_group_that_a_worker_died_with_stays_a_suspect(world: World, elsewhere: World, tmp_path: Path) -> None:
    world.start().admit(2)
    world.run_out(world.lease(1, worker="dying"))
    assert world.buffer.reap("math").requeued == 1
    world.buffer.save(tmp_path / "saved")
    elsewhere.buffer.restore(tmp_path / "saved")
    here, there = (
        set(at.buffer.client.zrange(task_keys(at.buffer.run, "math").suspects, 0, -1, withscores=True))
        for at in (world, elsewhere)
    )
    assert here
    assert here <= there
    elsewhere.check()


# -- files that are not as they were written ------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


DAMAGES: list[Callable[[Path], None]] = [flip, truncate, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=["flipped", "truncated", "missing"])
@pytest.mark.parametrize("name", [INDEX, "task-math/frames-00000.safetensors", "task-math/groups-00000.jsonl"])
def test_xb16_a_damaged_file_is_named_and_nothing_is_restored(
    world: World, elsewhere: World, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    world.start()
    world.complete(3)
    world.buffer.save(tmp_path / "saved")
    damage(tmp_path / "saved" / name)
    with pytest.raises(SnapshotError, match=name):
        elsewhere.buffer.restore(tmp_path / "saved")
    assert elsewhere.buffer.client.dbsize() == 0


def test_xb16_a_manifest_that_was_edited_is_refused(world: World, elsewhere: World, tmp_path: Path) -> None:
    world.start()
    world.complete(2)
    world.buffer.save(tmp_path / "saved")
    path = tmp_path / "saved" / INDEX
    edited = path.read_bytes().replace(b'"cursor": "2"', b'"cursor": "1"')
    assert edited != path.read_bytes()
    path.write_bytes(edited)
    with pytest.raises(SnapshotError, match=f"{INDEX}: its digest is wrong"):
        elsewhere.buffer.restore(tmp_path / "saved")


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_snapshot_of_a_run_with_another_schema_is_refused(
    world: World, elsewhere: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    world.start()
    with monkeypatch.context() as patch:
        patch.setattr("rollq.buffer.snapshots.save.SCHEMA_VERSION", version)
        world.buffer.save(tmp_path / "saved")
    with pytest.raises(SnapshotError, match=f"schema {version}, but this rollq restores schema {SCHEMA_VERSION}"):
        elsewhere.buffer.restore(tmp_path / "saved")


def test_xb16_a_snapshot_of_another_schema_is_refused(world: World, elsewhere: World, tmp_path: Path) -> None:
    world.start()
    world.buffer.save(tmp_path / "saved")
    path = tmp_path / "saved" / INDEX
    path.write_bytes(path.read_bytes().replace(b'"schema": 1', b'"schema": 9'))
    with pytest.raises(SnapshotError, match="has schema 9, this rollq reads 1"):
        elsewhere.buffer.restore(tmp_path / "saved")


def test_a_folder_that_holds_something_else_is_not_written(world: World, tmp_path: Path) -> None:
    world.start()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("mine")
    for replaces in (False, True):
        with pytest.raises(ConfigError, match="is not a snapshot: name another folder"):
            world.buffer.save(tmp_path / "full", replace=replaces)
    assert [path.name for path in tmp_path.iterdir() if path.name != "server"] == ["full"]


def test_a_snapshot_is_replaced_only_when_that_is_asked_for(world: World, tmp_path: Path) -> None:
    world.start()
    target = tmp_path / "backups" / "now"
    world.buffer.save(target)
    world.complete(2)
    with pytest.raises(ConfigError, match=r"holds a snapshot already.*--replace"):
        world.buffer.save(target)
    assert read_index(target)[0].groups == 0
    world.buffer.save(target, replace=True)
    assert read_index(target)[0].groups == 2
    assert list(target.parent.iterdir()) == [target]


def test_two_savers_of_one_folder_do_not_mix(world: World, tmp_path: Path) -> None:
    world.start()
    world.complete(2)
    refusals = []

    def second(_done: int, _total: int) -> None:
        with pytest.raises(ConfigError, match="being written by another process") as refusal:
            world.buffer.save(tmp_path / "saved")
        refusals.append(refusal)

    world.buffer.save(tmp_path / "saved", report=second)
    assert len(refusals) == 1
    assert read_index(tmp_path / "saved")[0].groups == 2


def test_a_file_that_appears_in_the_folder_while_it_is_saved_is_not_lost(world: World, tmp_path: Path) -> None:
    world.start().complete(2)
    thesis = tmp_path / "saved" / "thesis.tex"

    def somebody_writes(_done: int, _total: int) -> None:
        thesis.parent.mkdir()
        thesis.write_text("mine")

    with pytest.raises(ConfigError, match="is not a snapshot: name another folder"):
        world.buffer.save(tmp_path / "saved", report=somebody_writes)
    assert thesis.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name != "server"] == ["saved"]


def test_a_save_that_has_ended_does_not_remove_what_the_next_one_writes(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start().complete(2)
    world.buffer.save(tmp_path / "saved")
    rmtree = shutil.rmtree
    next_one = tmp_path / ".saved.saving" / "written by the next one"

    def while_the_former_is_removed(folder: Path, ignore_errors: bool = False) -> None:
        if folder.name == ".saved.former" and folder.exists():
            next_one.parent.mkdir()
            next_one.touch()
        rmtree(folder, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", while_the_former_is_removed)
    world.buffer.save(tmp_path / "saved", replace=True)
    assert next_one.exists()


# -- interrupted ----------------------------------------------------------------------------------------------------


def interrupt(*_: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("replaces", [False, True])
def test_xb16_an_interrupted_save_leaves_no_trace_and_holds_nothing_back(
    world: World, tmp_path: Path, replaces: bool
) -> None:
    target = tmp_path / "backups" / "now"
    world.start()
    world.complete(2)
    if replaces:
        world.buffer.save(target)
    world.complete(2)
    with pytest.raises(KeyboardInterrupt):
        world.buffer.save(target, replace=replaces, report=interrupt)
    assert list(target.parent.iterdir()) == [target] * replaces
    if replaces:
        assert read_index(target)[0].groups == 2
    world.train(1)
    world.buffer.checkpoint(world.held, 1)
    assert world.statuses() == {"completed": 2}


SAVE_AND_HANG = """
import sys
from pathlib import Path
from rollq.buffer.snapshots import save as saving
from rollq.buffer.wire.prompts import decode_prompt
from rollq.buffer.buffer import Buffer

saving.CHUNK_BYTES = saving.GROUPS_PER_TRIP = 1
def report(done, total):
    print(done, flush=True)
    if done == 3:
        sys.stdin.read()
with Buffer.connect(sys.argv[1], sys.argv[2]) as buffer:
    buffer.save(Path(sys.argv[3]), report=report)
"""


def test_sb07_killing_the_saver_leaves_no_half_snapshot_and_production_unharmed(
    any_server: AnyServer, world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start()
    world.complete(4)
    running = world.lease(2) if world.admit(2) else ()
    target = tmp_path / "backups" / "now"
    command = [sys.executable, "-c", SAVE_AND_HANG, any_server.url, world.buffer.run, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as saver:
        assert saver.stdout is not None
        while saver.stdout.readline() != b"3\n":
            assert saver.poll() is None
        os.kill(saver.pid, signal.SIGKILL)
    assert not target.exists()
    assert set(world.put(running)) == {PutOutcome.COMPLETED}
    world.train(1)
    world.train(2)
    world.check()
    assert world.buffer.save(target).groups == 6
    assert list(target.parent.iterdir()) == [target]
    elsewhere.buffer.restore(target)
    elsewhere.check()


def test_xb16_a_restore_that_died_is_ended_by_another_one(
    world: World, elsewhere: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.buffer.snapshots.restore.GROUPS_PER_CALL", 1)
    world.start(math=RULES, code={})
    world.complete(2, "code")
    fill(world)
    world.buffer.save(tmp_path / "saved")
    world.complete(1)
    world.buffer.save(tmp_path / "other")
    for groups in (1, 4):  # in the middle of the first task and of the second one

        def die(done: int, _total: int, groups: int = groups) -> None:
            if done == groups:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            elsewhere.buffer.restore(tmp_path / "saved", report=die)
        with pytest.raises(RunMismatch, match=r"is being restored.*repeat `rollq snapshot load`"):
            elsewhere.buffer.create_run()
    with pytest.raises(RunMismatch, match=r"another snapshot was being restored.*repeat that one"):
        elsewhere.buffer.restore(tmp_path / "other")
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    fork = World(Buffer(elsewhere.buffer.servers, "in-one-go"))
    fork.buffer.restore(tmp_path / "saved")
    for task in ("math", "code"):
        assert lasting(dump(elsewhere.buffer, task)) == lasting(dump(fork.buffer, task))


def test_a_restore_that_another_one_overtook_writes_nothing(
    world: World, elsewhere: World, fresh_server: EmbeddedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollq.buffer.snapshots.restore.GROUPS_PER_CALL", 1)
    world.start()
    world.complete(4)
    world.buffer.save(tmp_path / "saved")

    def overtake(done: int, _total: int) -> None:
        if done == 1:
            elsewhere.buffer.restore(tmp_path / "saved")
            elsewhere.begin(0, launch_id="quick")
            elsewhere.train(1)

    with Buffer.connect(fresh_server.url, elsewhere.buffer.run) as slow:
        slow.restore(tmp_path / "saved", report=overtake)
    elsewhere.check()
    assert elsewhere.statuses() == {"archived": 2, "completed": 2}


# -- saved while everything goes on ---------------------------------------------------------------------------------


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that comes to `report` after each group."""
    monkeypatch.setattr(saving, "GROUPS_PER_TRIP", 1)
    monkeypatch.setattr(saving, "CHUNK_GROUPS", 3)


def frames_of(dumped: Mapping[str, Any], group_id: int) -> dict[str, Any]:
    """The frames of a group, wherever they are."""
    kinds = (f"rollout:{group_id}", f"payload:{group_id}:")
    return {key: content for key, content in dumped.items() if key == kinds[0] or key.startswith(kinds[1])}


def once(act: Callable[[], None], at: int = 1) -> Callable[[int, int], None]:
    """A report that does something when so many groups are saved, the first time."""
    left = [act]

    def report(done: int, _total: int) -> None:
        if done == at and left:
            left.pop()()

    return report


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("resume", ["durable", "fresh"])
def test_sb07_what_is_saved_is_of_one_instant_while_everything_goes_on(
    world: World, elsewhere: World, tmp_path: Path, resume: str
) -> None:
    world.start(math={"resume": resume, "partial_rollout": True, "max_staleness": 1})
    world.complete(5)
    world.train(1)
    world.claim(2)
    world.admit(6)
    first, second, third, interrupted = world.lease(4)
    world.buffer.put([GroupResult(interrupted, (make_sample(1, status="a"), make_sample(1)))])
    before = lasting(dump(world.buffer))

    def everything() -> None:
        world.put([first, second])
        world.put([third], status="f")
        clock = world.buffer.clock("math")
        assert world.buffer.recycle("math", epoch=clock.epoch, target=1000, limit=10) == 1
        assert world.put(world.lease(2)) == [PutOutcome.COMPLETED] * 2
        world.buffer.publish(world.held, 2, uri="file:///weights/2", digest="digest-2")
        world.buffer.commit(world.held, 2)
        world.buffer.checkpoint(world.held, 2)
        world.train(3)
        world.buffer.publish(world.held, 5, uri="file:///weights/5", digest="digest-5")
        world.buffer.expire("math")
        world.admit(3)

    world.buffer.save(tmp_path / "saved", report=once(everything))
    world.check()
    assert world.buffer.clock("math").committed == 3

    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    after = lasting(dump(elsewhere.buffer))
    for status in ("completed", "claimed", "archived"):
        assert after.get(status) == before.get(status)
        for group_id in groups_in(after, status):
            group = after[f"group:{group_id}"]
            assert group == {**before[f"group:{group_id}"], b"put_nonce": group[b"put_nonce"]}
            assert frames_of(after, group_id) == frames_of(before, group_id) != {}
    # a group that was put meanwhile is saved without its frames
    assert after["progress"] | {b"bytes": b""} == before["progress"] | {b"bytes": b""}
    assert sorted(groups_in(after, "pending") + groups_in(after, "aborted")) == sorted(
        groups_in(before, "pending") + groups_in(before, "aborted")
    )
    # afterwards the held-back work is done
    world.buffer.checkpoint(world.held, 3)
    assert world.buffer.clock("math").checkpoint == 3


@pytest.mark.usefixtures("one_by_one")
def test_sb07_a_group_that_leaves_meanwhile_is_counted(world: World, elsewhere: World, tmp_path: Path) -> None:
    world.start(math={"tail_batch_trigger_size": -1, "audit_groups": 1})
    world.complete(2)
    world.admit(4)
    late, bad, worse = world.lease(3)
    world.put([bad], status="f")
    world.buffer.publish(world.held, 2, uri="file:///weights/2", digest="digest-2")

    def leave() -> None:
        assert world.put([late], version=0) == [PutOutcome.DROPPED]
        world.put([worse], status="f")

    world.buffer.save(tmp_path / "saved", report=once(leave))
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    assert elsewhere.statuses() == {"pending": 2, "completed": 2}
    assert elsewhere.buffer.counts("math").dropped == {"saving": 1, "failed": 1}


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("what", ["takeover", "release", "regenerate"])
def test_sb07_a_save_begins_again_when_a_batch_goes_from_under_it(
    world: World, elsewhere: World, tmp_path: Path, what: str
) -> None:
    world.start()
    world.complete(4)
    world.train(1)
    world.claim(2)

    def act() -> None:
        if what == "release":
            world.buffer.release(world.held, 2, "drop", claim_round=0)
        else:
            world.begin(0, launch_id="again", mode="replay" if what == "takeover" else "regenerate")

    world.buffer.save(tmp_path / "saved", report=once(act))
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    assert elsewhere.statuses() == world.statuses()
    assert elsewhere.buffer.clock("math").epoch == world.buffer.clock("math").epoch


@pytest.mark.usefixtures("one_by_one")
def test_sb07_a_save_whose_hold_ran_out_begins_again(world: World, tmp_path: Path) -> None:
    world.start()
    world.complete(4)
    reports = []

    def report(done: int, total: int) -> None:
        reports.append(done)
        if len(reports) == 1:
            set_clock(world.buffer, "math", saving_until_ms=0)

    world.buffer.save(tmp_path / "saved", report=report)
    assert reports == [1, 1, 2, 3, 4]


@pytest.mark.usefixtures("one_by_one")
def test_sb07_a_group_that_is_used_again_meanwhile_can_be_used_again_after_a_restore(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start(math={"max_uses": 2, "max_staleness": 5})
    world.complete(4)
    world.claim(1)

    def commit() -> None:
        world.buffer.publish(world.held, 1, uri="file:///weights/1", digest="digest-1")
        world.buffer.commit(world.held, 1)

    world.buffer.save(tmp_path / "saved", report=once(commit))
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.begin(0, launch_id="after")
    elsewhere.train(1)
    elsewhere.check()
    assert elsewhere.statuses() == world.statuses()
    assert elsewhere.buffer.counts("math").progress["reused"] == 2


KEPT, RESET = "ca", "pp"


@pytest.mark.parametrize(
    ("status", "now", "saved", "tries", "letters"),
    [
        ("pending", "pending", "pending", 2, KEPT),
        ("pending", "running", "pending", 1, KEPT),
        ("running", "running", "pending", 1, KEPT),
        ("running", "pending", "pending", 2, KEPT),
        ("running", "aborted", "pending", 0, KEPT),
        ("running", "completed", "pending", 0, RESET),
        ("running", "failed", "pending", 0, RESET),
        ("aborted", "aborted", "aborted", 2, KEPT),
        ("aborted", "running", "pending", 1, KEPT),
        ("aborted", "claimed", "pending", 0, RESET),
        ("expired", "expired", "expired", 2, KEPT),
        ("completed", "archived", "completed", 2, KEPT),
        ("claimed", "completed", "claimed", 2, KEPT),
        ("gathered", "filtered", "gathered", 2, KEPT),
    ],
)
def test_sb07_a_group_is_saved_as_it_was_in_the_index_or_as_still_to_be_sampled(
    status: str, now: str, saved: str, tries: int, letters: str
) -> None:
    result = {"letters": KEPT, "payload": "a key", "rows": "of its samples"}
    found = SavedGroup(7, status, "7", {"status": now, "tries": "2", "nonce": "n", **result}, {"0": b"0", "1": b"1"})
    group = as_indexed(found, None, admitted=9)
    assert (group.group_id, group.status, group.score) == (7, saved, "7")
    assert group.fields == {
        "status": saved,
        "tries": str(tries),
        **(result if letters is KEPT else {"letters": letters}),
    }
    assert group.frames == (found.frames if letters is KEPT else {})


@pytest.mark.parametrize("now", ["pending", "running", "aborted", "expired"])
def test_sb07_a_result_that_was_taken_apart_since_the_index_cannot_be_saved(now: str) -> None:
    found = SavedGroup(7, "completed", "7", {"status": now, "tries": "2", "letters": "cc"}, {})
    with pytest.raises(SnapshotError, match="group 7 was sent back"):
        as_indexed(found, None, admitted=9)


def open_batch(world: World) -> BatchState:
    """A batch of three groups, two of which are finished and one is leased; and a group that is no part of it."""
    assert world.admit(1) == 1
    held = world.lease(1)
    batch = world.buffer.open_batch("math", "b", "train", step=1)
    world.buffer.fill_batch("math", batch.handle, 0, [Prompt("a"), Prompt("b"), Prompt("c")], last=True)
    leases = world.lease(3)
    world.put(leases[:2])
    world.buffer.hand_back(held)
    return batch


def finalize(world: World, batch: BatchState) -> None:
    found = world.buffer.begin_finalize("math", batch.handle, "me", lease_s=60)
    shaped = {group.group_id: PipelineOutput((1.0, 0.0), (0.5, -0.5)) for group in found.groups}
    world.buffer.end_finalize("math", batch.handle, "me", b"{}", shaped)


@pytest.mark.usefixtures("one_by_one")
def test_sb07_an_open_batch_is_restored_open_although_it_was_finalized_meanwhile(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start()
    batch = open_batch(world)
    before = lasting(dump(world.buffer))
    world.buffer.save(tmp_path / "saved", report=once(lambda: finalize(world, batch)))
    assert world.statuses() == {"pending": 1, "completed": 2, "aborted": 1}
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    after = lasting(dump(elsewhere.buffer))
    for group_id in (2, 3):
        assert after[f"group:{group_id}"] == before[f"group:{group_id}"]
    assert after["gathered"] == before["gathered"]
    elsewhere.begin(0, launch_id="after")
    assert elsewhere.put(elsewhere.lease(2)) == [PutOutcome.COMPLETED, PutOutcome.GATHERED]
    assert elsewhere.buffer.batch_by_handle("math", batch.handle).complete


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("end", ["abort", "stale"])
def test_sb07_a_save_begins_again_when_an_open_batch_loses_groups_meanwhile(
    world: World, elsewhere: World, tmp_path: Path, end: str
) -> None:
    world.start()
    batch = open_batch(world)

    def act() -> None:
        if end == "abort":
            world.buffer.abort_batch("math", batch.handle, "enough")
        else:
            world.buffer.publish(world.held, 5, uri="file:///weights/5", digest="digest-5")
            finalize(world, batch)

    world.buffer.save(tmp_path / "saved", report=once(act))
    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    assert lasting(dump(elsewhere.buffer)) == lasting(dump(world.buffer))
    assert elsewhere.buffer.batch_by_handle("math", batch.handle).state == (
        "aborted" if end == "abort" else "finalized"
    )


AHEAD = 20


class Traffic:
    """Threads that produce, work and train until told to stop; what workers put and what the trainer got is noted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.put: dict[tuple[int, int], dict[bytes, bytes]] = {}
        self.batches: dict[int, list[int]] = {}
        self.stepped = threading.Condition()
        self.wanted = 0
        self._stop = threading.Event()

    def __enter__(self) -> "Traffic":
        self._pool = ThreadPoolExecutor()
        self._ends = [self._pool.submit(role) for role in (self._produce, self._work, self._work, self._train)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for end in self._ends:
            end.result(PATIENCE_S)
        self._pool.shutdown()

    def wait_for_steps(self, steps: int) -> None:
        """Until the trainer has made so many steps more."""
        with self.stepped:
            self.wanted = len(self.batches) + steps
            assert self.stepped.wait_for(lambda: len(self.batches) >= self.wanted, PATIENCE_S)

    def _rounds(self) -> Iterator[None]:
        with self.world.buffer.events() as events:
            while not self._stop.is_set():
                yield
                events.wait(0.05)

    def _produce(self) -> None:
        for _ in self._rounds():
            clock = self.world.buffer.clock("math")
            target = 4 * (clock.version + 4)
            self.world.buffer.recycle("math", epoch=clock.epoch, target=target, limit=10)
            self.world.admit(8, target=target)
            self.world.buffer.expire("math")

    def _work(self) -> None:
        for _ in self._rounds():
            for lease in self.world.lease(3):
                text = f"{lease.group_id}/{lease.attempt}"
                status = "a" if lease.group_id % 5 == 0 and lease.attempt == 1 else "c"
                made = [replace(make_sample(self.world.buffer.clock("math").version, status=status), text=text)] * 2
                payload = encode_payload(made, range(2), group_size=2)
                self.put[lease.group_id, lease.attempt] = {field.encode(): frame for field, frame in payload.items()}
                self.world.buffer.put([GroupResult(lease, tuple(made))])

    def _train(self) -> None:
        step = 1
        for _ in self._rounds():
            if step > self.wanted + AHEAD:  # a slow copy must end before too many steps are kept for it
                continue
            claimed = self.world.buffer.claim(self.world.held, step, {"math": 4})
            if isinstance(claimed, Claimed):
                self.world.buffer.publish(self.world.held, step, uri=f"file:///weights/{step}", digest=f"digest-{step}")
                self.world.buffer.commit(self.world.held, step)
                if step % 3 == 0:
                    self.world.buffer.checkpoint(self.world.held, step)
                with self.stepped:
                    self.batches[step] = [group.group_id for group in claimed.groups]
                    self.stepped.notify_all()
                step += 1


@pytest.mark.usefixtures("one_by_one")
def test_sb07_a_copy_is_taken_while_generation_goes_on_and_restores_to_a_consistent_state(
    world: World, elsewhere: World, tmp_path: Path
) -> None:
    world.start(math={"batch_groups": 4, "max_staleness": 3, "partial_rollout": True})
    with Traffic(world) as traffic:
        traffic.wait_for_steps(4)
        # the copy does not end before the trainer has made three more steps: nothing waits for it
        snapshot = world.buffer.save(tmp_path / "saved", report=once(lambda: traffic.wait_for_steps(3)))
        traffic.wait_for_steps(1)
    world.check()

    elsewhere.buffer.restore(tmp_path / "saved")
    elsewhere.check()
    counts, found = elsewhere.buffer.counts("math"), dump(elsewhere.buffer)
    finished = [group for status in ("completed", "claimed", "archived") for group in groups_in(found, status)]
    assert finished
    for group_id in finished:
        attempt = int(found[f"group:{group_id}"][b"attempt"])
        assert found[f"rollout:{group_id}"] == traffic.put[group_id, attempt]
    # every prompt up to the cursor is there, or was trained under a checkpoint
    stored = {int(name.partition(":")[2]): fields for name, fields in found.items() if name.startswith("group:")}
    assert all(
        decode_prompt(fields[b"prompt"]).content == f"math {group_id - 1}" for group_id, fields in stored.items()
    )
    gone = set(range(1, int(counts.progress["admitted"]) + 1)) - stored.keys()
    assert counts.dropped == {"trained": len(gone)}
    first, last = snapshot.resume_steps
    assert gone == {group_id for step in range(1, first + 1) for group_id in traffic.batches[step]}

    elsewhere.begin(first, launch_id="after")
    for step in range(first + 1, last + 1):
        assert [group.group_id for group in elsewhere.train(step, math=4).groups] == traffic.batches[step]
    elsewhere.check()
    assert elsewhere.admit(1) == 1
    assert elsewhere.buffer.inspect("math", int(counts.progress["admitted"]) + 1)["prompt"].count(
        f'"math {int(counts.progress["cursor"])}"'
    )
