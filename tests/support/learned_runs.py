"""Runs of two tasks that have learned without a model, with readable answers, an archive, and a stuck worker."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.archive.archiver import Archiver
from rollq.buffer.buffer import Buffer
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import GroupResult, Lease, Prompt, Sample
from support.buffer_run import World
from support.dashboard import REPORT, written

TASKS = ("math", "code")
CHANGED, SEARCHED, CHECKPOINT_EVERY = 40, 3, 10
"""The step from which on rules are others, the step with the longest wrong answer, and steps between checkpoints."""
START = 0.2
RATES = (1e-3, 3e-4)
"""Learning rates before the change and after it."""
LONG = "Wait, I should count once more."
"""What the longest wrong answer says again and again."""
RULES: dict[str, object] = {
    "archive": True, "batch_groups": 2, "group_size": 4, "max_staleness": 2, "max_uncheckpointed_steps": 100,
}  # fmt: skip
LIVELY, STUCK = "worker-1-c24fdf08", "worker-2-d2bc0e98"
SILENT_S = 43.0
"""How long the stuck worker has said nothing."""


@dataclass
class LearnedRun:
    """A run that has trained `steps` steps. `longest` is the number of the group of math with the longest wrong answer
    of step `SEARCHED`. `doing` is the phase that its trainer reports, and `leases` are the leases of its first
    worker."""

    world: World
    steps: int
    longest: int = 0
    doing: dict[str, Any] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)


def answer(world: World, prompt: Prompt, *samples: Sample, task: str = "math") -> int:
    """Admit a prompt, and put these answers; returns the number of the group."""
    clock, cursor = world.buffer.clock(task), int(world.buffer.counts(task).progress["cursor"])
    world.buffer.admit(
        task, [(prompt, cursor + 1)], epoch=clock.epoch, cursor=cursor, target=1_000_000, step=clock.step
    )
    (lease,) = world.lease(1, task, worker=LIVELY)
    world.buffer.put([GroupResult(lease, samples)])
    return lease.group_id


def learn(buffer: Buffer, folder: Path, *, steps: int, gain: float) -> LearnedRun:
    """Train `steps` steps. The reward of math grows from `START` by about `gain` a step, and code has half of it;
    answers grow, too. The first worker has the groups that are left.

    Every tenth step is evaluated, and its checkpoint moves batches to an archive in `folder`.
    """
    run = LearnedRun(World(buffer).start(math=RULES, code=RULES), steps)
    archiver = Archiver(buffer, str(folder), wait_s=0)
    for step in range(1, steps + 1):
        if step == CHANGED:
            buffer.change_rules("math", {"max_staleness": 4})
        _train(run, step, gain)
        if step % CHECKPOINT_EVERY == 0:
            buffer.report_evaluations(run.world.held, step, {"held_out": (START + gain * step) * 0.75})
            buffer.checkpoint(run.world.held, step)
            archiver.finish(threading.Event())
    for task in TASKS:
        clock, cursor = buffer.clock(task), int(buffer.counts(task).progress["cursor"])
        waiting = [(_prompt(task, 2 * clock.step + at), cursor + at + 1) for at in range(2)]
        buffer.admit(task, waiting, epoch=clock.epoch, cursor=cursor, target=1_000_000, step=clock.step)
        run.leases += run.world.lease(1, task, worker=LIVELY)
    return run


def _train(run: LearnedRun, step: int, gain: float) -> None:
    samples: dict[str, list[Sample]] = {}
    reward = START + gain * step
    for share, task in zip((1.0, 0.5), TASKS, strict=True):
        for place in range(2):
            group = [_sample(task, step, place * 4 + at, share * reward) for at in range(4)]
            found = answer(run.world, _prompt(task, 2 * step + place), *group, task=task)
            if (task, step, place) == ("math", SEARCHED, 1):
                run.longest = found
            samples.setdefault(task, []).extend(group)
    run.world.train(step, math=2, code=2)
    lengths = {task: [len(sample.text) for sample in of_task] for task, of_task in samples.items()}
    together = [length for of_task in lengths.values() for length in of_task]
    rewards = {"math": reward, "code": reward / 2}
    report = {
        "step": step, "reward": reward * 0.75, "rewards": rewards, "loss": 1 / step,
        "gradient_norm": 0.5, "learning_rate": RATES[step >= CHANGED],
        "response_length": {"mean": sum(together) / len(together), "max": max(together)},
    }  # fmt: skip
    run.world.buffer.report_trainer(run.world.held, report)
    run.doing = {
        "phase": "waiting", "step": step + 1, "for_s": 5.0, "ready": dict.fromkeys(TASKS, 0),
        "wanted": dict.fromkeys(TASKS, 2), "last_step_s": 6.0, "rewards": rewards, "busy_s": 2.0, "waited_s": 4.0,
        "response_tokens": {task: sum(of_task) / len(of_task) for task, of_task in lengths.items()},
    }  # fmt: skip


def _prompt(task: str, number: int) -> Prompt:
    if task == "code":
        return Prompt(f"Write a function that adds {number} to its argument.", answer=f"x + {number}", row=number)
    return Prompt(
        f"A farmer has {number} hens and buys 7 more. How many hens is that?", answer=str(number + 7), row=number
    )


def _sample(task: str, step: int, place: int, chance: float) -> Sample:
    """The answer at a place of the eight of a task's batch: as many are right as the chance says."""
    is_right = place < round(8 * chance)
    thinking = "So I add them one by one. " * (1 + step // 10)
    if (task, step, place) == ("math", SEARCHED, 7):
        thinking += f"{LONG} " * 12
    number = 2 * step + place // 4
    last = f"def add(x): return x {'+-'[not is_right]} {number}" if task == "code" else f"#### {number + 7 * is_right}"
    return written(thinking + last, reward=float(is_right), versions=(step - 1,), worker=LIVELY)


@contextmanager
def kept_alive(*runs: LearnedRun) -> Iterator[None]:
    """While this is open, the trainer of each run waits, its producer looks, and its first worker reports; the second
    one, on gpu-node-2, was last heard `SILENT_S` seconds ago."""
    stop = threading.Event()
    keepers = [threading.Thread(target=_keep, args=(run, stop)) for run in runs]
    for keeper in keepers:
        keeper.start()
    try:
        yield
    finally:
        stop.set()
        for keeper in keepers:
            keeper.join()


def _keep(run: LearnedRun, stop: threading.Event) -> None:
    buffer, started_s = run.world.buffer, time.monotonic()
    where = {name: {"host": f"gpu-node-{at}", "pid": 4711 + at} for at, name in ((1, LIVELY), (2, STUCK))}
    while True:
        lasting = time.monotonic() - started_s
        buffer.renew_trainer(run.world.held, {**run.doing, "for_s": 5 + lasting, "last_step_s": 6 + lasting})
        buffer.renew(run.leases)
        for task in TASKS:
            buffer.reap(task, Place("trainer-node", 4710))
        version = {"version": run.steps, "epoch": run.world.held.epoch}
        buffer.report_worker(LIVELY, {**REPORT, **version, **where[LIVELY], "in_flight": 2, "samples_in_flight": 8})
        last = orjson.dumps({**REPORT, **version, **where[STUCK]}).decode()
        heard_ms = buffer.server_ms() - round(SILENT_S * 1000)
        buffer.client.hset(buffer.keys.workers, STUCK, f"{heard_ms} {last}")
        if stop.wait(1):
            return


def write_settings(path: Path, run: str, url: str, archive: Path) -> Path:
    """Write the settings of a run of these tasks; returns the path."""
    tasks = "".join(
        f'[tasks.{task}]\nprompts = "p.jsonl"\njudge = "exact_match"\nbatch_groups = 2\ngroup_size = 4\n'
        for task in TASKS
    )
    path.write_text(
        f'run = "{run}"\n[redis]\nbuffer_url = "{url}"\n{tasks}[worker]\nengine = "simulated"\n'
        f'[archive]\nurl = "{archive}"\n'
    )
    return path
