"""Rules that change while the run is alive, on a real server."""

from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Shortfall
from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.buffer.rules.settings import TaskRules
from rollq.buffer.store.keys import task_keys
from rollq.buffer.values.rollouts import Status
from support.any_server import AnyServer
from support.buffer_run import World

FILE = TaskRules(batch_groups=2, group_size=2)


def test_a_change_holds_for_every_role_at_once_and_is_recorded(world: World, any_server: AnyServer) -> None:
    world.start()
    with Buffer.connect(any_server.url, world.buffer.run) as other:
        assert other.rules("math").max_staleness == 1
        revision = world.buffer.change_rules("math", {"max_staleness": "3", "max_tries": 5})
        assert revision is not None
        assert revision.changes == {"max_staleness": ("1", "3"), "max_tries": ("3", "5")}
        assert (revision.number, revision.step) == (2, 1)
        assert other.controls(["math"]), "which a role asks for anyway"
        assert other.rules("math") == world.buffer.rules("math")
        assert (other.rules("math").max_staleness, other.rules("math").max_tries) == (3, 5)
        assert [found.number for found in other.rule_revisions("math")] == [1, 2]
    assert world.buffer.change_rules("math", {"max_staleness": 3}) is None, "it is so already"


def test_a_lower_bound_holds_from_the_next_claim_on(world: World) -> None:
    world.start(math={"max_staleness": 4, "group_size": 2, "batch_groups": 2}).complete(6)
    world.train(1)
    first = world.claim(2)
    world.buffer.change_rules("math", {"max_staleness": 0})
    assert world.claim(2) == first, "a batch that was claimed stays"
    world.train(2)
    short = world.buffer.claim(world.held, 3, {"math": 2})
    assert isinstance(short, Shortfall)
    assert short.ready == {"math": 0}, "what is left is older than the weights"


def test_a_replayed_batch_is_the_same_under_other_rules(world: World) -> None:
    world.start(math={"max_staleness": 2, "group_size": 2, "batch_groups": 2}).complete(6)
    before = [world.train(step) for step in (1, 2)]
    assert {counting.token_threshold for claimed in before for counting in claimed.counting} == {3}
    world.buffer.change_rules("math", {"max_staleness": 0, "batch_groups": 1})
    world.begin(0, launch_id="launch-2")
    again = [world.claim(1), world.claim(2)]
    assert [(c.groups, c.counting) for c in again] == [(c.groups, c.counting) for c in before]
    manifests = [task_keys(world.buffer.run, "math").manifest(step) for step in (1, 2)]
    assert world.buffer.send_all([("HGET", key, "rules_revision") for key in manifests]) == [b"1", b"1"]


def test_a_batch_size_changes_at_the_first_step_that_is_not_planned(world: World) -> None:
    world.start(math={"group_size": 2, "batch_groups": 2}).complete(6)
    world.train(1)
    assert isinstance(world.buffer.claim(world.held, 2, {"math": 9}), Shortfall), "planned, and waited for"
    assert world.buffer.first_open_step() == 4, "the trainer may be planning step 3"
    revision = world.buffer.change_rules("math", {"batch_groups": 4})
    assert revision is not None
    assert revision.changes == {"schedule": ("none", "4:4")}
    assert revision.text == "revision 2: batch_groups 2 -> 4 from step 4 on"
    with pytest.raises(ConfigError, match="step 1: its batch is already claimed; use 2 or more"):
        world.buffer.change_rules("math", {"batch_groups": 3}, batch_step=1)
    world.buffer.change_rules("math", {"batch_groups": 8}, batch_step=50)
    assert world.buffer.rules("math").schedule == ((4, 4), (50, 8))


def test_steps_without_a_checkpoint_cannot_be_fewer_than_there_are(world: World) -> None:
    world.start().complete(6)
    world.train(1)
    world.train(2)
    with pytest.raises(ConfigError, match="max_uncheckpointed_steps = 1: the batches of 2 steps wait"):
        world.buffer.change_rules("math", {"max_uncheckpointed_steps": "1"})
    with pytest.raises(ConfigError, match=r"max_uncheckpointed_steps: must be a whole number"):
        world.buffer.change_rules("math", {"max_uncheckpointed_steps": "soon"})
    assert world.buffer.change_rules("math", {"max_uncheckpointed_steps": "2"})


def test_two_that_change_at_once_both_count(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    buffer, call_task = world.buffer, world.buffer.call_task

    def meanwhile(name: str, task: str, *args: Any) -> Any:
        monkeypatch.setattr(buffer, "call_task", call_task)
        assert name == "change_rules"
        buffer.change_rules("math", {"max_tries": 7})
        return call_task(name, task, *args)

    monkeypatch.setattr(buffer, "call_task", meanwhile)
    buffer.change_rules("math", {"max_deaths": 5})
    assert (buffer.rules("math").max_tries, buffer.rules("math").max_deaths) == (7, 5)
    assert [revision.number for revision in buffer.rule_revisions("math")] == [1, 2, 3]


def test_an_edited_file_is_followed_once_and_an_older_one_never(
    world: World, any_server: AnyServer, caplog: pytest.LogCaptureFixture
) -> None:
    buffer, edited = world.buffer, FILE.model_copy(update={"max_staleness": 3})
    buffer.create_run()
    buffer.register_task("math", FILE)
    buffer.register_task("math", FILE)
    buffer.register_task("math", edited)
    assert "task math: its settings were edited: revision 2: max_staleness 1 -> 3 from step 1 on" in caplog.text
    buffer.change_rules("math", {"max_staleness": 2})
    for _ in range(2):
        buffer.register_task("math", edited)
    assert buffer.rules("math").max_staleness == 2, "set by hand, after the file was edited"
    caplog.clear()
    buffer.register_task("math", FILE)
    assert "this settings file is older than the file of other roles, which has max_staleness = 3" in caplog.text
    assert [revision.number for revision in buffer.rule_revisions("math")] == [1, 2, 3]


def test_two_roles_that_start_with_one_edited_file_make_one_revision(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, edited = world.buffer, FILE.model_copy(update={"max_staleness": 3})
    buffer.create_run()
    buffer.register_task("math", FILE)
    call_task = buffer.call_task

    def meanwhile(name: str, task: str, *args: Any) -> Any:
        if name == "change_rules":
            monkeypatch.setattr(buffer, "call_task", call_task)
            buffer.register_task("math", edited)
        return call_task(name, task, *args)

    monkeypatch.setattr(buffer, "call_task", meanwhile)
    buffer.register_task("math", edited)
    assert [revision.number for revision in buffer.rule_revisions("math")] == [1, 2]


def test_a_fixed_rule_in_an_edited_file_is_refused_and_changes_nothing(world: World) -> None:
    buffer = world.buffer
    buffer.create_run()
    buffer.register_task("math", FILE)
    edited = FILE.model_copy(update={"max_staleness": 3, "order": "arrival"})
    with pytest.raises(RunMismatch, match="task 'math': order = arrival, and the run has staleness: it cannot change"):
        buffer.register_task("math", edited)
    assert buffer.rules("math").max_staleness == 1


def test_groups_that_cool_come_back_when_groups_are_used_once_from_now_on(world: World) -> None:
    world.start(math={"max_uses": 3, "max_staleness": 9, "reuse_cooldown_steps": 1, "group_size": 2, "batch_groups": 2})
    world.complete(8)
    world.train(1)
    assert world.statuses()["cooling"] == 2
    world.buffer.change_rules("math", {"max_uses": 1})
    for step in (2, 3):
        world.train(step)
    assert "cooling" not in world.statuses()


def test_a_task_that_leaves_the_batch_does_not_come_back_by_an_older_schedule(world: World) -> None:
    world.start(math={"group_size": 2, "batch_groups": 2, "schedule": ((10, 8),)})
    world.buffer.change_rules("math", {"batch_groups": 0})
    assert world.buffer.rules("math").schedule == ((2, 0),)


def test_only_the_last_hundred_revisions_are_kept(world: World) -> None:
    world.start()
    for tries in range(10, 130):
        world.buffer.change_rules("math", {"max_tries": tries})
    numbers = [revision.number for revision in world.buffer.rule_revisions("math")]
    assert numbers == list(range(22, 122))


def test_an_older_file_is_known_as_one_after_any_number_of_revisions(world: World) -> None:
    buffer, edited = world.buffer, FILE.model_copy(update={"max_staleness": 3})
    buffer.create_run()
    buffer.register_task("math", FILE)
    buffer.register_task("math", edited)
    for tries in range(10, 120):
        buffer.change_rules("math", {"max_tries": tries})
    buffer.register_task("math", FILE)
    assert buffer.rules("math").max_staleness == 3


def test_no_field_of_a_clock_but_rules_can_be_changed(world: World) -> None:
    world.start()
    with pytest.raises(Exception, match="'epoch', and must be a rule that may change"):
        world.buffer.call_task("change_rules", "math", 1, "{}", "", "", "epoch", 9)
    assert world.buffer.clock("math").epoch == 1


def test_revisions_are_saved_and_restored(world: World, any_server: AnyServer, tmp_path: Path) -> None:
    world.start().complete(2)
    world.buffer.change_rules("math", {"max_staleness": 3})
    world.buffer.save(tmp_path / "saved")
    with Buffer.connect(any_server.url, f"{world.buffer.run}-again") as other:
        other.restore(tmp_path / "saved", rules={"math": TaskRules(batch_groups=9, group_size=2)})
        assert other.rules("math") == world.buffer.rules("math")
        assert other.rule_revisions("math") == world.buffer.rule_revisions("math")
        assert other.clock("math").rules_revision == 2


def test_a_lower_cap_of_failed_groups_is_reached(world: World) -> None:
    world.start().admit(8)
    leases = world.lease(8)
    for lease in leases[:5]:
        world.put([lease], status="f")
    world.buffer.change_rules("math", {"audit_groups": 1})
    for lease in leases[5:]:
        world.put([lease], status="f")
    counts = world.buffer.counts("math")
    assert (counts.statuses[Status.FAILED], counts.dropped["failed"], counts.unaccounted) == (2, 6, 0)
