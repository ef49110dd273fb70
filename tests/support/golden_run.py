"""A run in which every role makes every call that it can, for tests that look at all functions."""

from collections.abc import Iterator
from pathlib import Path

from rollq.buffer.calls.orders import GroupOrder, Order
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.leases import Offer
from rollq.buffer.calls.replies.prompts import UnusableRow
from rollq.buffer.calls.replies.tasks import Control
from rollq.buffer.values.rollouts import FinishedGroup, Prompt, SamplePart
from support.buffer_run import World, make_sample, text_of
from support.finished_groups import finished_sample

GOLDEN_TASKS = ("math", "code", "held_out", "demos")
SAME_WEIGHTS = "3" * 64
"""Digest of weights that two trainers publish."""
LEASE_S = 600
"""The server knows a lease again for as long as it lasts: longer than a slow machine takes for the whole run."""


def golden_run(world: World, folder: Path) -> Iterator[str]:
    """A run in which every role makes every call that it can; yields after each move, with its name."""
    buffer = world.buffer
    world.start(
        math={"max_uses": 2, "max_staleness": 4, "lease_s": LEASE_S},
        code={"archive": True, "lease_s": LEASE_S},
        held_out={"kind": "eval", "lease_s": LEASE_S},
        demos={"offline": True},
    )
    buffer.record_prompts("math", "digest", 9, "", "prompts.jsonl")
    buffer.account_rows("math", "a", rows=9, passed=3, unusable=[UnusableRow(2, "not JSON", "prompts.jsonl:3")])
    yield "start"
    buffer.insert("demos", demonstrations(4), source="expert")
    yield "insert"
    world.admit(6)
    world.admit(4, "code")
    yield "admit"
    leases = world.lease(4)
    buffer.report_worker("worker", {"state": "busy"})
    buffer.join_fleet("worker", 8, load=4.0, tokens_per_s=100.0)
    buffer.forget_worker("worker")
    yield "lease"
    buffer.salvage([SamplePart(leases[3], 0, 0, 0, make_sample(0, status="a"))])
    buffer.salvage([SamplePart(leases[3], 1, 1, 0, make_sample(0, status="a"))])
    buffer.record([SamplePart(leases[3], 2, 1, 0, make_sample(0, status="a"))])
    yield "salvage"
    buffer.offer([Offer(leases[3], 0, (0, 1))])
    yield "offer"
    loans = buffer.borrow("math", 1, worker="another", version=0, epoch=1, share=1.0)
    yield "borrow"
    buffer.offer([Offer(leases[3], 1, taken_back=(1,))])
    buffer.renew(loans)
    buffer.salvage([SamplePart(loans[0], 0, 0, 0, make_sample(0))])
    yield "salvage what was borrowed"
    buffer.end_loans(loans)
    yield "end the loan"
    buffer.hand_back(leases[3:])
    yield "hand back"
    world.admit(1)
    (too_long,) = world.lease(1)
    buffer.drop_too_long(too_long, 5000, "the prompt has 5000 tokens")
    yield "drop too long"
    world.put(leases[:3])
    world.put(world.lease(4, "code"))
    yield "put"
    claimed = world.claim(1, math=2, code=2, demos=1)
    yield "claim"
    buffer.release(world.held, 1, "return", claim_round=claimed.claim_round)
    yield "release"
    world.claim(1, math=2, code=2, demos=1)
    yield "claim the step again"
    first, second = [group.group_id for group in claimed.groups if group.task == "math"]
    buffer.prioritize(world.held, "math", {first: 2.0})
    yield "prioritize"
    buffer.prioritize(world.held, "math", {first: 1.0, second: 4.0})
    yield "prioritize again"
    buffer.publish(world.held, 1, uri="u", digest="1")
    buffer.commit(world.held, 1)
    buffer.report_trainer(world.held, {"step": 1})
    yield "commit"
    buffer.save(folder / "saved")
    buffer.renew_trainer(world.held)
    yield "save"
    evaluation = buffer.open_batch("held_out", "eval/1", "eval", step=1)
    buffer.fill_batch("held_out", evaluation.handle, 0, [Prompt("one"), Prompt("two")], last=True)
    world.put(world.lease(2, "held_out"))
    yield "evaluate"
    buffer.close_evaluation("held_out", evaluation.handle)
    yield "end the evaluation"
    batch = buffer.open_batch("math", "batch", "train", step=2)
    buffer.fill_batch("math", batch.handle, 0, [Prompt("three")], last=True)
    world.put(world.lease(4))
    buffer.begin_finalize("math", batch.handle, "first", lease_s=600)
    yield "begin to finalize"
    buffer.undo_finalize("math", batch.handle, "first")
    yield "undo"
    found = buffer.begin_finalize("math", batch.handle, "second", lease_s=600)
    buffer.end_finalize("math", batch.handle, "second", b"{}", {group.group_id: "dull" for group in found.groups})
    cut = buffer.open_batch("math", "cut", "train", step=2)
    buffer.fill_batch("math", cut.handle, 0, [Prompt("four"), Prompt("five")], last=True)
    held = world.lease(1)
    buffer.cut_off("math", cut.handle)
    yield "cut off"
    buffer.renew(held)
    buffer.hand_back(held)
    yield "leave the batch"
    buffer.abort_batch("math", cut.handle, "for the test")
    other = buffer.open_batch("math", "other", "train", step=2)
    buffer.fill_batch("math", other.handle, 0, [Prompt("four")], last=True)
    buffer.abort_batch("math", other.handle, "for the test")
    yield "end batches"
    world.admit(4)
    aside, sampled_again, *others = world.lease(4)
    world.put([sampled_again])
    buffer.order_group("math", aside.group_id, GroupOrder.QUARANTINE)
    yield "quarantine by hand"
    buffer.order_group("math", sampled_again.group_id, GroupOrder.REQUEUE)
    buffer.order_group("math", aside.group_id, GroupOrder.REQUEUE, dry_run=True)
    buffer.order_group("math", aside.group_id, GroupOrder.REQUEUE)
    yield "requeue by hand"
    buffer.order_group("math", sampled_again.group_id, GroupOrder.DROP)
    buffer.order_group("math", others[0].group_id, GroupOrder.DROP)
    yield "drop by hand"
    buffer.change_rules("math", {"max_tries": 4})
    yield "change rules"
    buffer.exclude_rows("math", [5, 7])
    yield "exclude rows"
    buffer.exclude_rows("math", [7], undo=True)
    yield "include rows"
    buffer.order_worker("another", Order.PAUSE)
    yield "pause worker"
    buffer.order_worker("another", Order.RUN)
    yield "resume worker"
    buffer.set_control("math", Control.PAUSE, "for the test")
    yield "pause"
    buffer.set_control("math", Control.RUN)
    yield "resume"
    buffer.sleep(world.held, "a step")
    yield "sleep"
    buffer.sleep(world.held, "")
    yield "wake"
    world.train(2, math=2, code=2, demos=1)
    buffer.checkpoint(world.held, 1)
    yield "checkpoint"
    world.begin(1, mode="return", launch_id="second")
    yield "rewind"
    world.train(2, math=2, code=2, demos=1)
    yield "train again"
    buffer.checkpoint(world.held, 2)
    world.collect()
    yield "collect"
    while portion := buffer.take_to_archive("code", "archiver", most=3, wait_s=0):
        yield "take to archive"
        buffer.forget_archived(portion)
        yield "forget archived"
    buffer.leave_audit("code")
    world.begin(2, launch_id="third")
    yield "restart"
    fill(world, demos=4)
    yield "begin to fill"
    world.begin(2, launch_id="fourth")
    yield "restart while it fills"
    buffer.insert("demos", demonstrations(8), source="expert")
    fill(world, demos=4)
    yield "fill up"
    buffer.commit(world.held, 3)
    yield "commit what was trained in parts"
    buffer.publish(world.held, 4, uri="u", digest=SAME_WEIGHTS)
    world.admit(2)
    world.put(world.lease(2))
    yield "publish ahead"
    world.begin(3, launch_id="fifth")
    yield "rewind before it"
    buffer.publish(world.held, 4, uri="u", digest=SAME_WEIGHTS)
    yield "publish the same again"


def demonstrations(count: int) -> list[FinishedGroup]:
    """The first groups of an expert, of all sizes: what of them is large becomes a payload when it is restored."""
    return [
        FinishedGroup(Prompt(f"demo {number}"), (finished_sample(text=text_of(number)),) * 2)
        for number in range(1, count + 1)
    ]


def fill(world: World, **sizes: int) -> None:
    """Take what there is of the batch of step 3 as its next part."""
    claimed = world.buffer.claim(world.held, 3, sizes, so_far=True)
    assert isinstance(claimed, Claimed)
    assert world.buffer.divide(world.held, claimed)
