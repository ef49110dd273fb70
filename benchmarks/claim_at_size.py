"""The time of a claim from a million completed groups, compared with a thousand: it must not grow with their number."""

import time
from typing import get_args

from benchmarks.fill import fill, in_bulk
from benchmarks.results import Result, ratios, take_turns
from benchmarks.world import TASK, run, server
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.rules.settings import Order, TaskRules

BATCH_GROUPS = 256
GROUP_SIZE = 8
FEW = 1_000
MANY = 1_000_000


def measure(quick: bool) -> list[Result]:
    """The time of a claim of 256 out of 1,000,000 groups, divided by the time out of 1,000, for each order."""
    return [_measure(order, quick) for order in get_args(Order)]


def _measure(order: Order, quick: bool) -> Result:
    many = 20_000 if quick else MANY
    rules = TaskRules(batch_groups=BATCH_GROUPS, group_size=GROUP_SIZE, max_staleness=100_000, order=order)
    with (
        server() as small,
        server() as large,
        run(small.url, "few", rules) as (few_buffer, few_epoch),
        run(large.url, "many", rules) as (many_buffer, many_epoch),
    ):
        for buffer, count in ((few_buffer, FEW), (many_buffer, many)):
            with in_bulk(buffer.client):
                fill(buffer, [(0, count)], GROUP_SIZE)
        few_side, many_side = Claims(few_buffer, few_epoch), Claims(many_buffer, many_epoch)
        take_turns(2, few_side.seconds, many_side.seconds)
        of_few, of_many = take_turns(3 if quick else 40, few_side.seconds, many_side.seconds)
    return Result(
        name="claim-at-size" if order == "staleness" else f"claim-at-size-{order}",
        what=f"claim of {BATCH_GROUPS} groups out of {many:,} completed, order {order}, against out of {FEW:,}",
        unit="times as long",
        target=2.0,
        better="lower",
        values=ratios(of_many, of_few),
        details={
            "of_few_ms": sorted(of_few)[len(of_few) // 2] * 1e3,
            "of_many_ms": sorted(of_many)[len(of_many) // 2] * 1e3,
        },
    )


class Claims:
    """Claims batches of one run, step after step. Only the claim is timed, not the payloads."""

    def __init__(self, buffer: Buffer, epoch: TrainerEpoch) -> None:
        self.buffer = buffer
        self.epoch = epoch
        self.step = 0

    def seconds(self) -> float:
        """Time one claim, and refill the completed groups afterwards."""
        self.step += 1
        started = time.perf_counter()
        claimed = self.buffer.claim(self.epoch, self.step, {TASK: BATCH_GROUPS})
        elapsed_s = time.perf_counter() - started
        if not isinstance(claimed, Claimed):
            raise RuntimeError(f"nothing to claim: {claimed}")
        self.buffer.commit(self.epoch, self.step)
        self.buffer.checkpoint(self.epoch, self.step)
        fill(self.buffer, [(0, BATCH_GROUPS)], GROUP_SIZE)
        return elapsed_s
