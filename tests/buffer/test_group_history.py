"""What the buffer remembers of a group: its leases, its step, and when that was trained."""

from pathlib import Path

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.group_details import PastLease
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Prompt, SamplePart
from support.buffer_run import World, make_sample


def leases_of(buffer: Buffer, group_id: int = 1) -> tuple[PastLease, ...]:
    (group,) = buffer.look("math", [group_id])
    return group.leases


def ends_of(buffer: Buffer, group_id: int = 1) -> list[str]:
    return [lease.end for lease in leases_of(buffer, group_id)]


def test_a_group_remembers_who_had_it_from_when_until_when_and_how_that_ended(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.admit(1)
    before = buffer.server_ms()
    buffer.hand_back(world.lease(1, worker="a"))
    buffer.hand_back(world.lease(1, worker="b"), counted=True, error="no memory")
    world.put(world.lease(1, worker="c d"))
    after = buffer.server_ms()
    found = leases_of(buffer)
    assert [(lease.attempt, lease.end, lease.version, lease.worker) for lease in found] == [
        (1, "handed_back", 0, "a"), (2, "error", 0, "b"), (3, "put", 0, "c d")
    ]  # fmt: skip
    times = [time or 0 for lease in found for time in (lease.from_ms, lease.until_ms)]
    assert times == sorted(times)
    assert before <= times[0]
    assert times[-1] <= after


def test_an_interrupted_group_remembers_the_lease_that_put_it(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.admit(1)
    world.put(world.lease(1, worker="a"), status="a")
    assert ends_of(buffer) == ["put"]
    buffer.recycle("math", epoch=1, target=10**6, limit=1)
    world.lease(1, worker="b")
    assert [(lease.worker, lease.end, lease.until_ms is None) for lease in leases_of(buffer)] == [
        ("a", "put", False), ("b", "running", True)
    ]  # fmt: skip


def test_a_lease_that_runs_out_keeps_its_worker_and_what_was_salvaged(buffer: Buffer) -> None:
    world = World(buffer).start(math={"partial_rollout": True})
    world.admit(1)
    (lease,) = world.lease(1, worker="killed")
    buffer.salvage([SamplePart(lease, 0, 0, 0, make_sample(0, status="a"))])
    world.run_out([lease])
    buffer.reap("math")
    assert [(one.end, one.parts, one.worker) for one in leases_of(buffer)] == [("ran_out", 1, "killed")]


def test_a_lease_that_never_arrived_is_not_a_death(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.admit(1)
    leases = buffer._lease(["math"], 1, "w", "1:0", 0, True).leases
    world.run_out(leases)
    buffer.reap("math")
    assert ends_of(buffer) == ["unconfirmed"]


def test_a_lease_ends_with_its_batch(buffer: Buffer) -> None:
    world = World(buffer).start()
    batch = buffer.open_batch("math", "batch", "train", step=1)
    buffer.fill_batch("math", batch.handle, 0, [Prompt("one")], last=True)
    (lease,) = world.lease(1)
    buffer.begin_finalize("math", batch.handle, "nonce", lease_s=60)
    buffer.end_finalize("math", batch.handle, "nonce", b"{}", {})
    assert (buffer.inspect("math", lease.group_id)["status"], ends_of(buffer)) == ("aborted", ["batch_ended"])


def test_the_newest_16_leases_are_kept_in_a_bounded_text(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.admit(1)
    for number in range(20):
        buffer.hand_back(world.lease(1, worker=f"w{number}"))
    assert [lease.worker for lease in leases_of(buffer)] == [f"w{number}" for number in range(4, 20)]
    for number in range(20):
        buffer.hand_back(world.lease(1, worker=f"{number:02d}\n" + "long" * 100))
    kept = leases_of(buffer)
    assert len(buffer.inspect("math", 1)["history"]) <= 2000
    assert 10 < len(kept) <= 16
    assert kept[-1].worker == f"19?{'long' * 100}"[:64]


def test_a_late_copy_adds_nothing(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.admit(1)
    leases = world.lease(1)
    world.put(leases)
    before = buffer.inspect("math", 1)
    assert world.put(leases) == [PutOutcome.DUPLICATE]
    assert buffer.inspect("math", 1) == before


def test_history_survives_a_checkpoint_and_a_restore(buffer: Buffer, server_url: str, tmp_path: Path) -> None:
    world = World(buffer).start()
    world.complete(2)
    world.admit(1)
    buffer.hand_back(world.lease(1))
    world.lease(1)
    saved = {group_id: leases_of(buffer, group_id) for group_id in (1, 2, 3)}
    assert [len(leases) for leases in saved.values()] == [1, 1, 2]
    buffer.save(tmp_path / "saved")
    with Buffer.connect(server_url, f"{buffer.run}-restored") as restored:
        restored.restore(tmp_path / "saved")
        assert {group_id: leases_of(restored, group_id) for group_id in saved} == saved | {3: saved[3][:1]}


def test_a_copy_that_is_trained_again_has_the_history_and_names_its_original(buffer: Buffer) -> None:
    world = World(buffer).start(math={"max_uses": 2, "max_staleness": 4})
    world.complete(2)
    world.train(1)
    copied = buffer.inspect("math", 3)
    assert copied["copy_of"] == "1"
    assert leases_of(buffer, 3) == leases_of(buffer, 1)


def test_the_manifest_says_when_a_step_was_committed_until_it_is_replayed(buffer: Buffer) -> None:
    world = World(buffer).start()
    world.complete(2)
    world.train(1)
    manifest = task_keys(buffer.run, "math").manifest(1)
    claimed, committed = buffer.client.hmget(manifest, "claimed_ms", "committed_ms")
    assert int(claimed or 0) <= int(committed or 0) <= buffer.server_ms()
    world.begin(0, launch_id="second")
    assert buffer.client.hget(manifest, "committed_ms") is None
