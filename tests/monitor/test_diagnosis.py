"""The diagnosis of a run: each state has another first word, and the sentence names who holds the run back."""

from dataclasses import replace

import pytest

from rollq.buffer.calls.replies.prompts import Unusable
from rollq.buffer.calls.replies.tasks import LastError
from rollq.buffer.values.history import SeenProducer
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import Status
from rollq.buffer.values.trainer_state import TrainerPhase
from rollq.monitor.status.diagnosis import RULES, Level, State, diagnose
from rollq.monitor.status.read import RunStatus
from rollq.monitor.status.trainer_words import MOST_ERROR
from support.run_statuses import RATES, run_status, task_status, trainer_state, waiting, worker

HELD = {Status.COMPLETED: 3, Status.GATHERED: 29}
CODE = task_status("code", HELD)
MATH = task_status("math", {Status.COMPLETED: 16, Status.RUNNING: 4})

CASES: dict[str, tuple[RunStatus, str]] = {
    "no trainer yet": (
        run_status(trainer=None, model=None),
        "starting: no trainer has started\nto do: start the trainer: `rollq train`",
    ),
    "no trainer and no producer yet": (
        run_status(task_status(producer_silent_s=None), trainer=None, model=None),
        "starting: no trainer has started; nobody produces\n"
        "to do:\n"
        "  1. start the trainer: `rollq train`\n"
        "  2. start the producer: `rollq produce`",
    ),
    "a trainer that loads": (
        run_status(trainer=trainer_state(None)),
        "training: the trainer is starting; all workers are idle",
    ),
    "all is well": (
        run_status(MATH, workers={"w1": worker(4), "w2": worker()}),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 2 workers",
    ),
    "the archiver waits": (
        run_status(task_status(statuses={Status.RUNNING: 4}, archive_trouble="archive.url = '/a': full")),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 1 worker; the archiver "
        "waits: archive.url = '/a': full",
    ),
    "nobody archives": (
        run_status(task_status(statuses={Status.RUNNING: 4, Status.LEAVING: 64}, scheduled=644), task_status("code")),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 1 worker; 64 "
        "groups wait for the archive\n"
        "to do: start the archiver: `rollq archive`",
    ),
    "the bound holds production back": (
        run_status(task_status(statuses={Status.COMPLETED: 32})),
        "training: the trainer has been training step 41 for 12 s; production is held by the staleness bound "
        "until version 41 is published; all workers are idle",
    ),
    "a batch that lacks groups while the bound holds": (
        run_status(CODE, task_status("math", {Status.COMPLETED: 16}), trainer=waiting({"code": (3, 16)})),
        "starving: production of task code is held by the staleness bound until version 41 is published; nothing "
        "of task math is scheduled; all workers are idle; the trainer has waited 12 s for step 41: task code has "
        "3 of 16 groups\n"
        "to do: look at the producer's log: does it find prompts of task math?",
    ),
    "an offline task that is empty": (
        run_status(
            MATH,
            task_status("demos", {Status.COMPLETED: 1}, offline=True, producer_silent_s=None),
            trainer=waiting({"demos": (1, 16)}),
        ),
        "starving: only imports fill task demos; 4 groups running on 1 worker; the trainer has "
        "waited 12 s for step 41: task demos has 1 of 16 groups\n"
        "to do: import more into task demos: `rollq import`; or take it out of this batch: `rollq set demos "
        "batch_groups=0 --from-step 41`",
    ),
    "the only worker is paused": (
        run_status(
            task_status(statuses={Status.PENDING: 80}),
            trainer=waiting({"math": (0, 16)}),
            workers={"gpu0": worker(state="paused")},
        ),
        "paused: the only worker is paused; 80 groups of task math are pending; the trainer has waited 12 s for "
        "step 41: task math has 0 of 16 groups\n"
        "to do: continue with `rollq resume --worker gpu0`",
    ),
    "one of two workers is paused": (
        run_status(
            task_status(statuses={Status.PENDING: 80, Status.RUNNING: 4}),
            trainer=waiting({"math": (0, 16)}),
            workers={"gpu0": worker(state="paused"), "gpu1": worker(4)},
        ),
        "starving: 4 groups running on 2 workers; the trainer has waited 12 s for step 41: task math has 0 "
        "of 16 groups",
    ),
    "a judge fails for some samples": (
        run_status(
            task_status(statuses={Status.RUNNING: 4}),
            workers={
                "gpu0": worker(4, unrewarded=0.25, judge_error="judge 'a.b': KeyError: 'x' (a.py:8)"),
                "gpu1": worker(unrewarded=0.0),
                "gpu2": worker(unrewarded=None),
            },
        ),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 3 workers",
    ),
    "a judge fails for many samples": (
        run_status(
            task_status(statuses={Status.RUNNING: 4}),
            workers={"gpu0": worker(4, unrewarded=0.25, judge_error="judge 'a.b': KeyError: 'x' (a.py:8)")},
        ),
        "failing: the judges failed for 25% of the samples of the last minute, the last one with judge 'a.b': "
        "KeyError: 'x' (a.py:8); the trainer has been training step 41 for 12 s\n"
        "to do: fix the judge, or what it depends on, and restart every worker: samples for which it fails are "
        'left out, and the rest of their groups is trained; judging.on_judge_error = "zero" counts them as wrong '
        "instead",
    ),
    "a judge blocks a worker": (
        run_status(
            task_status(statuses={Status.RUNNING: 4}),
            trainer=waiting({"math": (0, 16)}),
            workers={"gpu0": worker(4, blocked_by="judges.py:8 in slow, for 12 s", hanging_calls=3)},
        ),
        "starving: worker gpu0 is blocked by judges.py:8 in slow, for 12 s; 3 calls of judges hang on worker gpu0; "
        "4 groups running on 1 worker; the trainer has waited 12 s for step 41: task math has 0 of 16 groups\n"
        "to do:\n"
        "  1. make it a plain function, which runs in a thread, or let it await instead of blocking\n"
        "  2. set judging.isolate_judge = true: then a call that takes too long is killed",
    ),
    "groups wait for an archiver that is at work": (
        run_status(
            task_status(statuses={Status.RUNNING: 4, Status.LEAVING: 360}, scheduled=644, archives=True),
        ),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 1 worker; 360 groups wait "
        "for the archive",
    ),
    "offline tasks alone need neither producers nor workers": (
        run_status(task_status("demos", {Status.COMPLETED: 90}, offline=True, producer_silent_s=None), workers={}),
        "training: the trainer has been training step 41 for 12 s",
    ),
    "slow workers": (
        run_status(
            task_status(statuses={Status.COMPLETED: 5, Status.RUNNING: 11}),
            trainer=waiting({"math": (5, 16)}),
            workers={"w1": worker(11)},
        ),
        "starving: 11 groups running on 1 worker; the trainer has waited 12 s for step 41: task math has 5 "
        "of 16 groups",
    ),
    "a wait that is no longer than twice the usual step": (
        run_status(
            task_status(statuses={Status.COMPLETED: 5, Status.RUNNING: 11}),
            trainer=waiting({"math": (5, 16)}, busy_s=6.5, last_step_s=12.4),
            workers={"w1": worker(11), "w2": worker(condition="silent")},
        ),
        "training: the trainer has waited 12 s for step 41: task math has 5 of 16 groups; last step 12 s ago; 11 "
        "groups running on 1 of 2 workers; w2 on box, process 4242, has said nothing for 0.4 s",
    ),
    "an evaluation that nobody produces": (
        run_status(task_status(producer_silent_s=None), trainer=trainer_state(TrainerPhase.EVALUATING), workers={}),
        "starving: nobody produces; no worker is alive; the trainer has been evaluating for 12 s\n"
        "to do:\n"
        "  1. start the producer: `rollq produce`\n"
        "  2. start a worker: `rollq work`",
    ),
    "stragglers": (
        run_status(
            task_status(statuses={Status.COMPLETED: 20, Status.RUNNING: 2}),
            trainer=replace(waiting({"math": (20, 16)}), stragglers={"math": 2}),
            workers={"w1": worker(2)},
        ),
        "starving: 2 groups running on 1 worker; the trainer has waited 12 s for step 41: 2 running groups "
        "would be too old at the next step",
    ),
    "no workers": (
        run_status(task_status(statuses={Status.PENDING: 32}), trainer=waiting({"math": (0, 16)}), workers={}),
        "starving: no worker is alive; 32 groups of task math are pending; the trainer has waited 12 s for step "
        "41: task math has 0 of 16 groups\n"
        "to do: start a worker: `rollq work`",
    ),
    "workers that died": (
        run_status(
            task_status(statuses={Status.PENDING: 4}),
            trainer=waiting({"math": (0, 16)}),
            workers={
                "w1": worker(condition="dead", pid=11, age_s=50.0, gpus="0,1"),
                "w2": worker(condition="dead", age_s=60.0),
                "w3": worker(condition="silent", age_s=12.0, gpus="3 (NVIDIA H100 80GB HBM3)"),
                "w4": worker(condition="dead", age_s=70.0),
            },
        ),
        "starving: no worker is alive; 4 groups of task math are pending; the trainer has waited 12 s for step "
        "41: task math has 0 of 16 groups; w3 on box, process 4242, has said nothing for 12 s, and may still hold GPU "
        "3 (NVIDIA H100 80GB HBM3); w1 on box, process 11, has said nothing for 50 s, and may still hold GPUs 0,1; 2 "
        "other workers have also gone silent\n"
        "to do:\n"
        "  1. start a worker: `rollq work`\n"
        "  2. if process 4242 still runs on box, end it, so that its GPU is free: `kill -9 4242`\n"
        "  3. if process 11 still runs on box, end it, so that its GPU is free: `kill -9 11`",
    ),
    "workers that take nothing": (
        run_status(task_status(statuses={Status.PENDING: 4}), trainer=waiting({"math": (0, 16)})),
        "starving: no worker takes the 4 pending groups: all workers are idle; the trainer has waited 12 s for "
        "step 41: task math has 0 of 16 groups",
    ),
    "a worker that refuses weights": (
        run_status(
            task_status(statuses={Status.PENDING: 4}),
            trainer=waiting({"math": (0, 16)}),
            workers={"w1": worker(refused_weights="version 40:\n too large")},
        ),
        "starving: worker w1 refuses the weights: version 40: too large; no worker takes the 4 pending groups: "
        "all workers are idle; the trainer has waited 12 s for step 41: task math has 0 of 16 groups",
    ),
    "the trainer waits for the archive": (
        run_status(
            task_status(statuses={Status.COMPLETED: 16, Status.LEAVING: 64}, scheduled=656),
            trainer=waiting({"math": (16, 16)}, unarchived={"math": 64}),
        ),
        "starving: the trainer has waited 12 s for step 41: 64 groups must be in the archive before; all "
        "workers are idle\n"
        "to do: start the archiver: `rollq archive`",
    ),
    "no producer": (
        run_status(
            task_status(producer_silent_s=45.0, producers=(SeenProducer(Place("box", 7), 45.0),)),
            trainer=waiting({"math": (0, 16)}),
        ),
        "starving: nobody produces for 45 s, the last one on box, process 7; all workers are idle; the trainer has "
        "waited 12 s for step 41: task math has 0 of 16 groups\n"
        "to do: start the producer: `rollq produce`; if the last one still runs, its log says what it waits for",
    ),
    "a producer that refuses its rows": (
        run_status(
            task_status(
                producer_silent_s=45.0,
                progress={"rows": 900, "rows_read": 51, "rows_unusable": 51},
                unusable={"no field 'answer'": Unusable(50, "p.jsonl:1"), "not JSON": Unusable(1, "p.jsonl:9")},
            ),
            trainer=waiting({"math": (0, 16)}),
        ),
        "starving: nobody produces for 45 s; 51 of 51 rows that were read of task math are unusable: 50 x no field "
        "'answer', first p.jsonl:1; 1 x not JSON, first p.jsonl:9; all workers are idle; the trainer has waited 12 s "
        "for step 41: task math has 0 of 16 groups\n"
        "to do: start the producer: `rollq produce`",
    ),
    "a hook that ended production": (
        run_status(
            task_status(statuses={Status.COMPLETED: 3}, control="done", control_reason="its hook said so"),
            trainer=waiting({"math": (3, 16)}),
        ),
        "starving: production of task math has ended: its hook said so; all workers are idle; the trainer has "
        "waited 12 s for step 41: task math has 3 of 16 groups",
    ),
    "what the trainer lacked is there": (
        run_status(MATH, trainer=waiting({"math": (15, 16)}), workers={"w1": worker(4)}),
        "training: the trainer has been training step 41 for 0.5 s; 4 groups running on 1 worker",
    ),
    "the trainer has moved on since its last word": (
        run_status(MATH, trainer=waiting({"math": (1, 16)}, step=39), workers={"w1": worker(4)}),
        "training: the trainer has trained step 40; 4 groups running on 1 worker",
    ),
    "some groups fail": (
        run_status(
            replace(MATH, last_error=LastError("ValueError: no answer", 3.0), rates=replace(RATES, failed=0.5)),
            workers={"w1": worker(4)},
        ),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 1 worker; "
        "groups of task math fail, the last one with ValueError: no answer",
    ),
    "paused": (
        run_status(
            task_status("code", control="pause"),
            task_status("math", control="pause", control_reason="for the night"),
            trainer=waiting({"math": (0, 16)}),
        ),
        "paused: tasks code, math set to pause: for the night; the trainer has waited 12 s for step 41: task math"
        " has 0 of 16 groups\n"
        "to do: continue with `rollq resume`",
    ),
    "a judge that raises": (
        run_status(
            task_status(
                outcomes=12, kept=0, progress={"failed": 12.0}, last_error=LastError("judge: KeyError: 'answer'", 3.0)
            ),
            trainer=waiting({"math": (0, 16)}),
        ),
        "failing: none of the last 12 groups of task math is worth training: 12 have failed and 0 were filtered "
        "out so far, the last one with judge: KeyError: 'answer'; the trainer has waited 12 s for step 41: task "
        "math has 0 of 16 groups\n"
        "to do:\n"
        "  1. fix the cause\n"
        "  2. restart every worker: a running worker keeps its old code and settings",
    ),
    "production that was stopped": (
        run_status(task_status(control="stopped", control_reason="2 of 64 groups"), trainer=waiting({"math": (0, 16)})),
        "failing: production of task math has stopped: 2 of 64 groups; the trainer has waited 12 s for step 41: "
        "task math has 0 of 16 groups\n"
        "to do:\n"
        "  1. fix the cause\n"
        "  2. restart every worker: a running worker keeps its old code and settings\n"
        "  3. let production continue: `rollq resume`",
    ),
    "a full server": (
        run_status(trainer=waiting({"math": (3, 16)}), fullness=Fullness(0.87)),
        "memory full: the server's memory is full to 87% of maxmemory, and no new groups are admitted above 80%"
        "; the trainer has waited 12 s for step 41: task math has 0 of 16 groups\n"
        "to do: raise maxmemory, if the machine has more memory: `redis-cli CONFIG SET maxmemory BYTES`, and the "
        "same in the server's configuration file",
    ),
    "a trainer that was killed": (
        run_status(trainer=trainer_state(silent_s=45.0, lease_left_s=0.0, for_s=57.0)),
        "trainer gone: nothing has been heard of the trainer for 45 s; it was then training step 41; its lease is"
        " over\n"
        "to do: start the trainer again: `rollq train` continues from its checkpoint of step 30; an old trainer "
        "that still runs can no longer write then",
    ),
    "a trainer that has just been killed": (
        run_status(trainer=trainer_state(silent_s=15.0, lease_left_s=15.0)),
        "trainer gone: nothing has been heard of the trainer for 15 s; it was then training step 41; its lease "
        "holds for 15 s\n"
        "to do: start the trainer again: `rollq train` continues from its checkpoint of step 30; an old trainer "
        "that still runs can no longer write then",
    ),
    "a full server stopped the trainer": (
        run_status(
            task_status(statuses={Status.ARCHIVED: 160}),
            trainer=trainer_state(TrainerPhase.FAILED, error="ProductionStalled: no batch for step 41: ..."),
            fullness=Fullness.of_memory(98 * 2**20, 100 * 2**20),
        ),
        "memory full: the server's memory is full to 98% of maxmemory (98 MiB of 100 MiB), and no new groups are "
        "admitted above 80%; because of that the trainer failed at step 41\n"
        "to do:\n"
        "  1. raise maxmemory, if the machine has more memory: `redis-cli CONFIG SET maxmemory 200mb`, and the "
        "same in the server's configuration file\n"
        "  2. start the trainer again: `rollq train` continues from its checkpoint of step 30\n"
        "  3. to avoid this, save checkpoints more often, with a smaller `checkpoint_every`: trained groups stay in "
        "memory until the next checkpoint",
    ),
    "groups fill what they may take": (
        run_status(MATH, fullness=Fullness.of_groups(900, 10, 1000, "payloads.max_buffer_bytes")),
        "memory full: groups take 90% of payloads.max_buffer_bytes, including groups on the way (900 B of "
        "1,000 B), and no new groups are admitted above 80%; the trainer has been training step 41 for 12 s\n"
        "to do: raise payloads.max_buffer_bytes in the settings file, and restart the producer and the trainer",
    ),
    "production that was stopped, and the trainer with it": (
        run_status(
            task_status(control="stopped", control_reason="every one failed", checkpoint=0),
            trainer=trainer_state(TrainerPhase.FAILED, error="ProductionStopped: no batch for step 41: ..."),
            workers={},
        ),
        "failing: production of task math has stopped: every one failed; because of that the trainer failed at "
        "step 41\n"
        "to do:\n"
        "  1. fix the cause\n"
        "  2. let production continue: `rollq resume`\n"
        "  3. start the trainer again: `rollq train` starts over, as no checkpoint is known\n"
        "  4. start a worker: `rollq work`",
    ),
    "production that was stopped, and a trainer that failed by itself": (
        run_status(
            task_status(control="stopped", control_reason="every one failed"),
            trainer=trainer_state(TrainerPhase.FAILED, error="OSError: disk full"),
        ),
        "failing: production of task math has stopped: every one failed; the trainer failed at step 41 with "
        "OSError: disk full\n"
        "to do:\n"
        "  1. fix the cause\n"
        "  2. restart every worker: a running worker keeps its old code and settings\n"
        "  3. let production continue: `rollq resume`\n"
        "  4. start the trainer again: `rollq train` continues from its checkpoint of step 30",
    ),
    "a trainer that was killed within a second after its last word": (
        run_status(
            task_status(statuses={Status.CLAIMED: 16}),
            trainer=trainer_state(step=39, silent_s=45.0, lease_left_s=0.0, for_s=46.0),
        ),
        "trainer gone: nothing has been heard of the trainer for 45 s; it was then training step 41; its lease is"
        " over\n"
        "to do: start the trainer again: `rollq train` continues from its checkpoint of step 30; an old trainer "
        "that still runs can no longer write then",
    ),
    "a trainer that was killed within its first second": (
        run_status(
            task_status(statuses={Status.CLAIMED: 16}),
            trainer=trainer_state(None, step=0, silent_s=45.0, lease_left_s=0.0),
        ),
        "trainer gone: nothing has been heard of the trainer for 45 s; it was then training step 41; its lease is"
        " over\n"
        "to do: start the trainer again: `rollq train` continues from its checkpoint of step 30; an old trainer "
        "that still runs can no longer write then",
    ),
    "a trainer that was killed between two steps": (
        run_status(trainer=trainer_state(step=39, silent_s=45.0, lease_left_s=0.0, for_s=46.0), workers={}),
        "trainer gone: nothing has been heard of the trainer for 45 s; it was then done with step 40; its lease "
        "is over\n"
        "to do:\n"
        "  1. start the trainer again: `rollq train` continues from its checkpoint of step 30; an old trainer "
        "that still runs can no longer write then\n"
        "  2. start a worker: `rollq work`",
    ),
    "a trainer that was killed while it waited": (
        run_status(MATH, trainer=waiting({"math": (15, 16)}, silent_s=45.0, lease_left_s=0.0)),
        "trainer gone: nothing has been heard of the trainer for 45 s; it was then waiting for step 41; its lease"
        " is over\n"
        "to do: start the trainer again: `rollq train` continues from its checkpoint of step 30; an old trainer "
        "that still runs can no longer write then",
    ),
    "paused, without workers": (
        run_status(task_status(control="pause"), trainer=waiting({"math": (0, 16)}), workers={}),
        "paused: task math set to pause; the trainer has waited 12 s for step 41: task math has 0 of 16 groups\n"
        "to do:\n"
        "  1. continue with `rollq resume`\n"
        "  2. start a worker: `rollq work`",
    ),
    "a trainer that failed": (
        run_status(trainer=trainer_state(TrainerPhase.FAILED, error="ValueError: " + "x" * 500, silent_s=900.0)),
        f"trainer gone: the trainer failed at step 41 with ValueError: {'x' * (MOST_ERROR - 15)}...\n"
        "to do:\n"
        "  1. fix the cause first, or it will fail again\n"
        "  2. start the trainer again: `rollq train` continues from its checkpoint of step 30",
    ),
    "a trainer that was stopped": (
        run_status(trainer=trainer_state(TrainerPhase.STOPPED, lease_left_s=0.0)),
        "stopped: the trainer was stopped after step 40\n"
        "to do: start the trainer again: `rollq train` continues from its checkpoint of step 30",
    ),
    "a run that is over": (
        run_status(trainer=trainer_state(TrainerPhase.FINISHED, lease_left_s=0.0, silent_s=9000.0), workers={}),
        "finished: the trainer has ended after step 40",
    ),
    "an evaluation does not hold a run up": (
        run_status(MATH, task_status("held_out", kind="eval", control="pause"), workers={"w1": worker(4)}),
        "training: the trainer has been training step 41 for 12 s; 4 groups running on 1 worker",
    ),
}


@pytest.mark.parametrize(("run", "line"), CASES.values(), ids=list(CASES))
def test_a_run_is_diagnosed_in_one_sentence(run: RunStatus, line: str) -> None:
    found = diagnose(run)
    assert "\n".join([str(found), *found.to_do]) == line


def synchronous(**trainer: float) -> RunStatus:
    task = task_status(statuses={Status.RUNNING: 16}, stale_threshold=1)
    return run_status(task, trainer=waiting({"math": (0, 16)}, **trainer), workers={"w1": worker(16)})


def asynchronous(**trainer: float) -> RunStatus:
    task = task_status(statuses={Status.RUNNING: 16}, stale_threshold=3)
    return run_status(task, trainer=waiting({"math": (0, 16)}, **trainer), workers={"w1": worker(16)})


@pytest.mark.parametrize(
    ("run", "state"),
    [
        (synchronous(for_s=60.0, busy_s=5.0, usual_wait_s=30.0), State.TRAINING),
        (synchronous(for_s=71.0, busy_s=5.0, usual_wait_s=30.0), State.STARVING),
        (asynchronous(for_s=9.0, busy_s=5.0, usual_wait_s=0.5), State.TRAINING),
        (asynchronous(for_s=11.0, busy_s=5.0, usual_wait_s=0.5), State.STARVING),
        (asynchronous(for_s=11.0, busy_s=5.0, usual_wait_s=300.0), State.STARVING),
        (asynchronous(for_s=4.0, busy_s=0.1), State.TRAINING),
    ],
)
def test_only_a_wait_of_more_than_two_usual_steps_is_starvation(run: RunStatus, state: State) -> None:
    assert diagnose(run).state is state


def test_the_first_batch_may_take_as_long_as_workers_need_to_load_their_model() -> None:
    run = asynchronous(for_s=50.0)
    assert run.trainer
    assert diagnose(replace(run, trainer=replace(run.trainer, busy_s=None))).state is State.TRAINING
    assert diagnose(replace(run, trainer=replace(run.trainer, busy_s=None, for_s=70.0))).state is State.STARVING


def test_a_state_with_something_to_do_is_never_green() -> None:
    for run, _ in CASES.values():
        found = diagnose(run)
        assert found.level is not Level.GOOD or not found.to_do
        assert (found.level is Level.BAD) == (found.state in (State.FAILING, State.MEMORY_FULL, State.TRAINER_GONE))
    assert {diagnose(run).level for run, _ in CASES.values()} == set(Level)


def test_every_state_is_shown_by_one_of_the_cases() -> None:
    assert {diagnose(run).state for run, _ in CASES.values()} == set(State)


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        (TrainerPhase.PUBLISHING, "the trainer has been publishing weights for 12 s"),
        (TrainerPhase.SAVING, "the trainer has been saving a checkpoint for 12 s"),
        (TrainerPhase.EVALUATING, "the trainer has been evaluating for 12 s"),
        (TrainerPhase.COMMITTED, "the trainer has trained step 41"),
        (TrainerPhase.STARTING, "the trainer is starting"),
    ],
)
def test_the_trainers_work_is_named(phase: TrainerPhase, words: str) -> None:
    assert diagnose(run_status(MATH, trainer=trainer_state(phase))).sentence.startswith(words)


def test_a_few_failed_groups_at_the_start_are_not_a_failure() -> None:
    few = task_status(outcomes=3, kept=0, progress={"failed": 3.0})
    assert diagnose(run_status(few)).state is State.TRAINING
    assert diagnose(run_status(replace(few, outcomes=4))).state is State.FAILING


def test_states_are_tried_in_an_order_in_which_each_explains_those_after_it() -> None:
    assert [rule.state for rule in RULES] == [
        State.STARTING, State.FINISHED, State.MEMORY_FULL, State.FAILING, State.TRAINER_GONE, State.TRAINER_GONE,
        State.STOPPED, State.PAUSED, State.FAILING, State.STARVING, State.TRAINING, State.PAUSED,
        State.STARVING, State.TRAINING,
    ]  # fmt: skip
    assert {rule.state for rule in RULES} == set(State)
