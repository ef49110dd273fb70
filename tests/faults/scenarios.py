"""The situations in which each role is killed at every one of its Redis calls."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from rq import Queue

from faults import processes
from faults.crash_points import Scenario, Stage
from faults.history import History
from faults.inserting import insert_recorded
from faults.operator import delete_and_restore
from faults.processes import BATCH, LENDING, LIGHT, OFFLINE_BATCH, SETTINGS_FILE, Role, write_settings
from faults.stand_ins import StandIns
from faults.trainer import RANKS, Launch, newest_checkpoint
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import Status
from support.buffer_run import set_clock
from support.waiting import PATIENCE_S, wait_until

STEPS_BEFORE, STEPS = 3, 5
SPARE_STEPS = 4
"""Batches beyond those of all steps, for a restart that has groups sampled again."""
LONG_STALENESS = 20
PRODUCER_TICKS = 3
HOLDER, BORROWER = "holder", "borrower"
LENT = replace(LENDING, group_size=8, samples_in_flight=4, lengths=(1000,), tokens_per_s=700.0, lease_s=2.0)


def _stand_ins(stage: Stage) -> StandIns:
    return StandIns(stage.url, stage.run, stage.folder, SETTINGS_FILE)


# -- the trainer ------------------------------------------------------------------------------------------------------


def _prepare_training(stage: Stage) -> None:
    """Three steps are trained and the second is checkpointed; the batches of all further steps are there."""
    write_settings(stage.folder, stage.run, prompts=200)
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.create(max_staleness=LONG_STALENESS)
        stand_ins.begin()
        for task, groups in OFFLINE_BATCH.items():
            insert_recorded(
                History(stage.folder / "history", "importer"), stand_ins.buffer, task, groups * (STEPS + SPARE_STEPS)
            )
        for task, groups in BATCH.items():
            stand_ins.complete(task, groups * (STEPS + SPARE_STEPS))
    _train_to_the_end(stage, "replay", STEPS_BEFORE)


def _prepare_restored(stage: Stage) -> None:
    """The same run, deleted and restored: large groups that were inserted are payloads now."""
    _prepare_training(stage)
    with closing(_stand_ins(stage).buffer) as buffer:
        assert not delete_and_restore(buffer, stage.url, stage.folder / "snapshot", meanwhile=lambda: None)


def _ranks(stage: Stage, urls: Sequence[str], mode: str, last_step: int) -> list[Role]:
    step, weights = newest_checkpoint(stage.folder)
    launch_id = f"launch-{len(list((stage.folder / 'history').iterdir()))}"
    ranks = []
    for rank in range(RANKS):
        launch = Launch(
            urls[rank], stage.run, stage.folder, launch_id, mode, step, weights, last_step, checkpoint_every=2
        )
        ranks.append(Role(f"trainer{rank}", processes.train, launch, rank))
        ranks[-1].start()
    return ranks


def _train_to_the_end(stage: Stage, mode: str, last_step: int) -> list[str]:
    """A launch that nothing disturbs."""
    for rank in _ranks(stage, [stage.url] * RANKS, mode, last_step):
        if not rank.wait(PATIENCE_S):
            return [f"{rank.name} is stuck"]
    with closing(_stand_ins(stage).buffer) as buffer:
        committed = {task: buffer.clock(task).committed for task in BATCH}
    return [] if set(committed.values()) == {last_step} else [f"the last committed steps are {committed}"]


def _start_training(fused: int, mode: str, stage: Stage, url: str) -> list[Role]:
    urls = [stage.url] * RANKS
    urls[fused] = url
    ranks = _ranks(stage, urls, mode, STEPS)
    return [ranks[fused], *ranks[:fused], *ranks[fused + 1 :]]


def _training(mode: str, rank: int, *, restored: bool = False) -> Scenario:
    return Scenario(
        f"trainer, rank {rank}, {mode}{', restored' if restored else ''}",
        prepare=_prepare_restored if restored else _prepare_training,
        start=partial(_start_training, rank, mode),
        finish=lambda stage: _train_to_the_end(stage, mode, STEPS),
        threshold=LONG_STALENESS + 1,
    )


# -- the producer -----------------------------------------------------------------------------------------------------


def _prepare_production(stage: Stage) -> None:
    """Some groups wait to be recycled, some are held by dead workers, and there is room for more."""
    write_settings(stage.folder, stage.run, prompts=200)
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.create()
        stand_ins.begin()
        for task in BATCH:
            assert stand_ins.world.admit(2, task) == 2
            assert len(stand_ins.world.lease(2, task)) == 2


def _start_production(stage: Stage, url: str) -> list[Role]:
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.lose_workers()
    producer = Role("producer", processes.produce_ticks, stage.folder, url, PRODUCER_TICKS)
    producer.start()
    return [producer]


def _finish_production(stage: Stage) -> list[str]:
    [producer] = _start_production(stage, stage.url)
    if not producer.wait(PATIENCE_S):
        return ["the next producer is stuck"]
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        pending, tickets = stand_ins.count(Status.PENDING), len(_queue(stage))
        target = sum(groups * processes.THRESHOLD for groups in BATCH.values())
    if pending != target or tickets < pending:
        return [f"{pending} groups are pending with {tickets} tickets, {target} were wanted"]
    return []


def _queue(stage: Stage) -> Queue:
    return open_queue(stage.url, stage.run)


# -- the worker -------------------------------------------------------------------------------------------------------


def _prepare_work(stage: Stage) -> None:
    """Groups are pending, and their tickets are queued."""
    write_settings(stage.folder, stage.run, prompts=200)
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.create()
        stand_ins.begin()
        for task, groups in BATCH.items():
            assert stand_ins.world.admit(groups, task) == groups
        stand_ins.buffer.enqueue_missing_tickets(_queue(stage), sum(BATCH.values()), 1)


def _start_work(stage: Stage, url: str) -> list[Role]:
    worker = Role("worker", processes.work, stage.folder, url, "worker")
    worker.start()
    return [worker]


def _top_up(stand_ins: StandIns, queue: Queue) -> int:
    """Add tickets as a producer does; returns how many groups are unfinished."""
    pending = stand_ins.count(Status.PENDING)
    stand_ins.buffer.enqueue_missing_tickets(queue, pending, 1)
    return pending + stand_ins.count(Status.RUNNING)


def _all_completed(stage: Stage) -> bool:
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        return stand_ins.count(Status.COMPLETED) == sum(BATCH.values())


def _finish_work(stage: Stage) -> list[str]:
    """The leases of the dead worker run out, and another one does what is left."""
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.lose_workers()
        stand_ins.sweep()
        [worker] = _start_work(stage, stage.url)
        wait_until(lambda: not worker.alive or not _top_up(stand_ins, _queue(stage)))
        worker.send(signal.SIGKILL)
        worker.wait(PATIENCE_S)
        completed = stand_ins.count(Status.COMPLETED)
    return [] if completed == sum(BATCH.values()) else [f"only {completed} groups were completed"]


# -- workers that lend samples to each other --------------------------------------------------------------------------


class Lending:
    """A group of which one worker makes some samples for another. The one in `role` dies; the other one lives on."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._others: list[Role] = []

    def prepare(self, stage: Stage) -> None:
        """One group is pending, and its ticket is queued."""
        write_settings(stage.folder, stage.run, LENT, prompts=200)
        stand_ins = _stand_ins(stage)
        with closing(stand_ins.buffer):
            stand_ins.create()
            stand_ins.begin()
            assert stand_ins.world.admit(1) == 1
            stand_ins.buffer.enqueue_missing_tickets(_queue(stage), 1, 1)

    def start(self, stage: Stage, url: str) -> list[Role]:
        """Only the holder leases groups. It starts when the other one can borrow."""
        urls = {role: url if role == self._role else stage.url for role in (HOLDER, BORROWER)}
        roles = {
            HOLDER: Role(HOLDER, processes.work, stage.folder, urls[HOLDER], HOLDER),
            BORROWER: Role(BORROWER, processes.work_for_others, stage.folder, urls[BORROWER], BORROWER),
        }
        roles[BORROWER].start()
        stand_ins = _stand_ins(stage)
        with closing(stand_ins.buffer):
            wait_until(lambda: bool(stand_ins.buffer.workers()))
        roles[HOLDER].start()
        fused = roles.pop(self._role)
        self._others = list(roles.values())
        return [fused]

    def ended(self, stage: Stage) -> bool:
        """Whether the group is completed."""
        stand_ins = _stand_ins(stage)
        with closing(stand_ins.buffer):
            return stand_ins.count(Status.COMPLETED) == 1

    def finish(self, stage: Stage) -> list[str]:
        """What the dead worker had is free after a lease. The other one, and a new holder, make the rest of it."""
        stand_ins = _stand_ins(stage)
        with closing(stand_ins.buffer):
            if self._role == HOLDER:
                self._others += _start_work(stage, stage.url)
            set_clock(stand_ins.buffer, "math", reaped_ms=stand_ins.buffer.server_ms(), hold_until_ms=0)

            def completed() -> bool:
                stand_ins.sweep()
                _top_up(stand_ins, _queue(stage))
                return stand_ins.count(Status.COMPLETED) == 1

            wait_until(completed, otherwise=lambda: stand_ins.buffer.counts("math"))
            for role in self._others:
                role.send(signal.SIGKILL)
                role.wait(PATIENCE_S)
            return list(_wrong_samples(stand_ins))


def _wrong_samples(stand_ins: StandIns) -> Iterator[str]:
    """Each sample of the only group was made once, from its first token to its last."""
    produced = stand_ins.buffer.counts("math").progress["produced"]
    if produced != 1:
        yield f"{produced} results were filed"
    (group,) = stand_ins.buffer.fetch(stand_ins.buffer.preview(1, {"math": 1}))
    made = [sample.segments[0].response_ids.tolist() if sample.segments else [] for sample in group.samples]
    lengths = [len(ids) for ids in made]
    if lengths != [LENT.lengths[0]] * LENT.group_size:
        yield f"the samples have {lengths} tokens"
    if len(set(map(tuple, made))) < len(made):
        yield "two samples have the same tokens"
    letters = "".join(sample.status.value for sample in group.samples)
    if letters != "c" * LENT.group_size:
        yield f"the samples are {letters!r}"


def _lending(role: str, *functions: str) -> Scenario:
    lending = Lending(role)
    return Scenario(
        f"lending, {role}", lending.prepare, lending.start, lending.finish, ended=lending.ended, only=functions
    )


# -- the sweeper ------------------------------------------------------------------------------------------------------


def _prepare_sweep(stage: Stage) -> None:
    """Dead workers hold groups, and completed groups are too stale.

    Who has not swept for a third of a lease declares no worker dead; a sweeper's process starts well within it.
    """
    write_settings(stage.folder, stage.run, replace(LIGHT, lease_s=3 * PATIENCE_S), prompts=200)
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.create()
        stand_ins.begin()
        for task in BATCH:
            stand_ins.complete(task, 3)
            assert stand_ins.world.admit(2, task) == 2
            assert len(stand_ins.world.lease(2, task)) == 2
        for version in range(1, processes.THRESHOLD + 1):
            stand_ins.buffer.publish(stand_ins.world.held, version, uri="", digest=f"weights {version}")


def _start_sweep(stage: Stage, url: str) -> list[Role]:
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        stand_ins.lose_workers()
    sweeper = Role("sweeper", processes.sweep, stage.folder, url)
    sweeper.start()
    return [sweeper]


def _finish_sweep(stage: Stage) -> list[str]:
    [sweeper] = _start_sweep(stage, stage.url)
    if not sweeper.wait(PATIENCE_S):
        return ["the next sweeper is stuck"]
    stand_ins = _stand_ins(stage)
    with closing(stand_ins.buffer):
        found = stand_ins.count(Status.PENDING), stand_ins.count(Status.EXPIRED), stand_ins.count(Status.RUNNING)
    wanted = 2 * len(BATCH), 3 * len(BATCH), 0
    return [] if found == wanted else [f"pending, expired and running are {found}, not {wanted}"]


def scenarios() -> list[Scenario]:
    """Every role in every situation."""
    return [
        *(_training(mode, rank=0) for mode in ("replay", "return", "regenerate")),
        _training("replay", rank=1),
        _training("replay", rank=0, restored=True),
        Scenario("producer", _prepare_production, _start_production, _finish_production),
        Scenario("worker", _prepare_work, _start_work, _finish_work, ended=_all_completed),
        _lending(HOLDER, "offer", "salvage", "renew", "put"),
        _lending(BORROWER, "borrow", "salvage", "renew", "end_loan"),
        Scenario("sweeper", _prepare_sweep, _start_sweep, _finish_sweep),
    ]
