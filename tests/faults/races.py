"""Contests that only one side may win: late results against new leases, and trainers against each other."""

import threading
from collections import Counter
from collections.abc import Sequence

from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.replies.leases import PutOutcome
from rollq.buffer.errors import TrainerHeld
from support.buffer_run import World

GROUPS = 50
RIVALS = ("left", "right")


def zombie_puts(url: str, count: int) -> Counter[PutOutcome]:
    """What becomes of `count` results of workers that lost their leases; some of the groups have a new holder."""
    outcomes: Counter[PutOutcome] = Counter()
    for number in range(-(-count // GROUPS)):
        with Buffer.connect(url, f"zombies-{number}") as buffer:
            world = World(buffer).start()
            world.admit(GROUPS)
            lost = world.lease(GROUPS)
            world.run_out(lost)
            buffer.reap("math")
            held = world.lease(GROUPS)
            assert held
            outcomes.update(world.put(lost))
            assert buffer.renew(held).gone == []
            world.check()
    return outcomes


def trainer_races(url: str, count: int) -> int:
    """In how many of `count` races exactly one of two trainers took the run, and the other was told so."""
    fair = 0
    with Buffer.connect(url, "races") as buffer:
        world = World(buffer).start()
        for number in range(count):
            buffer.client.hset(buffer.keys.trainer, "deadline_ms", 0)
            before = world.buffer.clock("math").epoch
            winners = _race(url, number)
            fair += len(winners) == 1 and buffer.clock("math").epoch == before + 1
        world.check()
    return fair


def _race(url: str, number: int) -> Sequence[str]:
    """The trainers that took the run."""
    line, winners = threading.Barrier(len(RIVALS)), []

    def run(rival: str) -> None:
        with Buffer.connect(url, "races") as buffer:
            line.wait()
            try:
                buffer.begin_epoch(
                    trainer_id=rival, launch_id=f"{rival} {number}", from_step=0, uri="", digest=f"{rival} {number}"
                )
            except TrainerHeld:
                return
            winners.append(rival)

    threads = [threading.Thread(target=run, args=(rival,)) for rival in RIVALS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return winners
