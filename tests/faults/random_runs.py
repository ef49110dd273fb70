"""Random runs of one trainer after the other: launches that die between two calls, rewinds, releases, snapshots,
insertions, an operator, and a server that loses functions, evicts, or has the run deleted.

Unlike the model of one task, which knows what each call must do, this only knows the promises: no history of weights
trains a group twice, a replay serves the recorded batches, every batch has its samples, a role that wakes after its run
was deleted changes nothing, and the buffer's own invariants hold.
"""

import random
import tempfile
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from faults.sleepers import Sleepers
from rollq.buffer.buffer import Buffer
from rollq.buffer.calls.claiming import ReleaseMode
from rollq.buffer.calls.orders import GroupOrder
from rollq.buffer.calls.replies.claims import Claimed
from rollq.buffer.calls.replies.trainer import TrainerEpoch
from rollq.buffer.calls.training import ResumeMode
from rollq.buffer.errors import CheckpointOverdue, HistoryGone, ServerRefused, StaleWorker
from rollq.buffer.rules.settings import Order, TaskRules
from rollq.buffer.tickets import open_queue
from rollq.buffer.values.rollouts import FinishedGroup, GroupResult, Prompt
from rollq.buffer.wire.group_fields import MOST_INLINE_BYTES
from support.buffer_run import World, let_go, make_sample, text_of
from support.finished_groups import finished_sample
from support.invariants import check_task

Batch = frozenset[tuple[str, int]]
ACTIONS = {
    "train": 30, "produce": 30, "save": 10, "launch": 8, "release": 6, "checkpoint": 5, "regenerate": 3, "register": 2,
    "take_snapshot": 2, "die_before_commit": 2, "insert": 6, "order_group": 6, "lose_functions": 4, "evict": 2,
    "delete_and_restore": 2,
}  # fmt: skip
"""What may happen next, and how often."""
DIES_IN = {"train", "save", "release", "checkpoint", "regenerate", "die_before_commit"}
OFFLINE = "demos"
INSERTED_TEXT = "y" * (MOST_INLINE_BYTES + 1)
"""Makes the frame of an inserted group a separate key once it is restored."""
RELEASE_MODES: tuple[ReleaseMode, ...] = ("return", "drop", "quarantine")
RESUME_MODES: tuple[ResumeMode, ...] = ("replay", "replay", "return", "regenerate")


class Died(Exception):
    """The trainer's process has died."""


class MortalBuffer(Buffer):
    """Raises `Died` instead of making the call before which `calls_left` have been made."""

    calls_left: int | None = None

    def call(self, name: str, key: str, *args: Any) -> Any:
        if self.calls_left == 0:
            self.calls_left = None
            raise Died
        if self.calls_left is not None:
            self.calls_left -= 1
        return super().call(name, key, *args)


class Checkpoint(NamedTuple):
    """A trainer's checkpoint: its step, its lineage, and the batches that its weights were trained on."""

    step: int
    lineage: str | None
    trained: Mapping[int, Batch]


class RandomRun:
    """One run, decided by a seed. `log` tells its story."""

    def __init__(self, seed: int, url: str) -> None:
        self.log: list[object] = []
        self._rng = random.Random(seed)
        self._url, self._name = url, f"random-{seed}"
        self._world = World(MortalBuffer.connect(url, self._name))
        self._rules = {
            "batch_groups": 2, "group_size": 2, "max_staleness": 3, "max_uncheckpointed_steps": 12,
            "max_uses": self._rng.choice([1, 1, 2, 3]), "order": self._rng.choice(get_args(Order)),
            "resume": self._rng.choice(["durable", "durable", "fresh"]),
            "expiry": self._rng.choice(["member", "group"]), "min_valid_samples": 2,
        }  # fmt: skip
        self._checkpoints = [Checkpoint(0, None, {})]
        self._held: TrainerEpoch | None = None
        self._launches = self._step = 0
        self._sizes: dict[str, int] = {}
        self._trained: dict[int, Batch] = {}  # by the weights of the trainer that is alive
        self._recorded: dict[int, Batch] = {}  # what a replay must serve

    @property
    def _buffer(self) -> MortalBuffer:
        assert isinstance(self._world.buffer, MortalBuffer)
        return self._world.buffer

    def play(self, actions: int) -> None:
        """Take random actions. Raises `AssertionError` at the first broken promise."""
        self._buffer.create_run()
        self._register_task("a")
        for _ in range(actions):
            self._act("launch" if self._held is None else self._rng.choices([*ACTIONS], [*ACTIONS.values()])[0])
            for task in self._buffer.tasks():
                check_task(self._buffer, task)
        self._buffer.close()

    def _act(self, action: str) -> None:
        if action in DIES_IN and self._rng.random() < 0.15:
            self._buffer.calls_left = self._rng.randrange(9)
        self.log.append((action, self._step))
        try:
            getattr(self, f"_{action}")()
        except Died:
            self.log.append("died")
            self._recorded.pop(self._step + 1, None)
            self._held = None
        except CheckpointOverdue:
            self._buffer.calls_left = None
            self._save()
            self._buffer.checkpoint(self._live(), self._step)
        self._buffer.calls_left = None

    def _live(self) -> TrainerEpoch:
        assert self._held is not None
        return self._held

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _launch(self) -> None:
        chosen, mode = self._rng.choice(self._checkpoints[-6:]), self._rng.choice(RESUME_MODES)
        self._launches += 1
        self.log.append((chosen.step, chosen.lineage, mode))
        if self._rng.random() < 0.25:
            self._buffer.calls_left = self._rng.randrange(8)
        try:
            held = self._buffer.begin_epoch(
                trainer_id="trainer", launch_id=str(self._launches), from_step=chosen.step, mode=mode, uri="u",
                digest=str(self._launches), lineage=chosen.lineage, takeover=True,
            )  # fmt: skip
        except HistoryGone:
            return
        except Died:
            if mode != "replay":
                self._forget_records(chosen.step)
            raise
        self._held, self._trained, self._step = held, dict(chosen.trained), chosen.step
        if mode != "replay":
            self._forget_records(chosen.step)
        tasks = self._buffer.train_tasks()
        self._sizes = dict.fromkeys(tasks, 2) if self._rng.random() < 0.7 else {self._rng.choice(tasks): 2}

    def _forget_records(self, after: int) -> None:
        self._recorded = {step: batch for step, batch in self._recorded.items() if step <= after}

    def _claim(self) -> Claimed | None:
        claimed = self._buffer.claim(self._live(), self._step + 1, self._sizes)
        return claimed if isinstance(claimed, Claimed) else None

    def _receive(self, claimed: Claimed) -> Batch:
        """Check a batch, and remember it."""
        batch = frozenset((group.task, group.group_id) for group in claimed.groups)
        for step, before in self._trained.items():
            assert not batch & before, f"step {claimed.step}: {batch & before} was trained at step {step}"
        replayed = claimed.step <= self._live().replayed_through and self._rules["resume"] != "fresh"
        if replayed and claimed.step in self._recorded:
            assert self._recorded[claimed.step] == batch, f"step {claimed.step} was replayed with another batch"
        self._recorded[claimed.step] = batch
        for group in self._buffer.fetch(claimed.groups):
            texts = [sample.text for sample in group.samples]
            assert texts == [_text_for(group.prompt)] * 2, f"{group.prompt} of {group.task} has samples of others"
        return batch

    def _train(self) -> None:
        self._produce()
        if (claimed := self._claim()) is None:
            return
        batch = self._receive(claimed)
        if self._rng.random() < 0.8:
            digest = f"{self._live().epoch}.{claimed.step}"
            self._buffer.publish(self._live(), claimed.step, uri="u", digest=digest)
        self._buffer.commit(self._live(), claimed.step)
        self._step = claimed.step
        self._trained[claimed.step] = batch

    def _die_before_commit(self) -> None:
        """Train a batch, save a checkpoint, and die."""
        if (claimed := self._claim()) is not None:
            self._trained[claimed.step] = self._receive(claimed)
            self._step = claimed.step
            self._save()
            self._held = None

    def _release(self) -> None:
        if (claimed := self._claim()) is not None:
            self._recorded.pop(claimed.step, None)
            mode = self._rng.choice(RELEASE_MODES)
            self._buffer.release(self._live(), claimed.step, mode, claim_round=claimed.claim_round)

    def _regenerate(self) -> None:
        """Have the rest of a replay sampled again, as for weights that differ from the recorded ones."""
        if 1 <= self._step < self._live().replayed_through:
            self._forget_records(self._step)
            self._buffer.regenerate_replays(self._live(), self._step)

    def _save(self) -> None:
        lineage = self._buffer.lineage_of(self._live())
        self._checkpoints.append(Checkpoint(self._step, lineage, dict(self._trained)))

    def _checkpoint(self) -> None:
        """Report the newest checkpoint of this trainer."""
        lineage = self._buffer.lineage_of(self._live())
        if steps := [saved.step for saved in self._checkpoints if saved.lineage == lineage]:
            self._buffer.checkpoint(self._live(), steps[-1])

    # -- the other roles ----------------------------------------------------------------------------------------------

    def _register(self) -> None:
        self._register_task(self._rng.choice(["m", "z"]))

    def _register_task(self, task: str) -> None:
        self._buffer.register_task(task, TaskRules.model_validate(self._rules))

    def _produce(self) -> None:
        for task in self._buffer.train_tasks():
            if task != OFFLINE and self._buffer.clock(task).version >= 0:
                with suppress(StaleWorker):
                    self._produce_for(task)
                self._buffer.expire(task)

    def _produce_for(self, task: str) -> None:
        if self._buffer.counts(task).ready < 8:
            self._world.admit(self._rng.choice([1, 2, 4]), task)
        live = self._buffer.live_model()
        assert live is not None
        leases = self._buffer.lease([task], 8, worker="worker", version=live.version, epoch=live.epoch).leases
        finished = [lease for lease in leases if self._rng.random() < 0.9]
        results = []
        for lease in finished:
            version = max(0, live.version - self._rng.choice([0, 0, 0, 1]))
            made = make_sample(version, epoch=live.epoch, text=_text_for(lease.prompt))
            results.append(GroupResult(lease, (made,) * 2))
        self._buffer.put(results)
        self._buffer.hand_back([lease for lease in leases if lease not in finished])

    def _insert(self) -> None:
        """An expert's groups arrive, each larger than the field of a hash."""
        self._buffer.register_task(OFFLINE, TaskRules.model_validate({**self._rules, "offline": True}))
        done, samples = self._buffer.inserted(OFFLINE, "expert"), (finished_sample(text=INSERTED_TEXT),) * 2
        groups = [FinishedGroup(Prompt(f"{OFFLINE} {done + number}"), samples) for number in range(3)]
        self._buffer.insert(OFFLINE, groups, source="expert", after=done)

    # -- the operator and the server ----------------------------------------------------------------------------------

    def _order_group(self) -> None:
        task, order = self._rng.choice(self._buffer.train_tasks()), self._rng.choice([*GroupOrder])
        if admitted := int(self._buffer.counts(task).progress["admitted"]):
            group_id = self._rng.randint(1, admitted)
            self.log.append((task, group_id, order, self._buffer.order_group(task, group_id, order)))

    def _lose_functions(self) -> None:
        self._buffer.client.function_flush()

    def _evict(self) -> None:
        """The server may evict keys for a while: no role stays, none starts, and what is under way gets through."""
        self._buffer.client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(ServerRefused):
                self._buffer.memory()
            with pytest.raises(ServerRefused):
                MortalBuffer.connect(self._url, self._name)
            self._produce()
        finally:
            self._buffer.client.config_set("maxmemory-policy", "noeviction")

    def _take_snapshot(self) -> None:
        """Save the run, and mostly restore it into an emptied store."""
        with tempfile.TemporaryDirectory() as folder:
            self._buffer.save(Path(folder) / "snapshot")
            if self._rng.random() < 0.6:
                for key in self._buffer.client.scan_iter(f"rollq:{{{self._name}*"):
                    self._buffer.client.delete(key)
                self._restore(Path(folder) / "snapshot")

    def _delete_and_restore(self) -> None:
        """Roles sleep while their run is deleted, and wake up before and after it is restored."""
        sleepers = Sleepers(self._url, self._world, "a", self._held)
        with tempfile.TemporaryDirectory() as folder, closing(sleepers):
            self._buffer.save(Path(folder) / "snapshot")
            self._delete()
            sleepers.wake()
            left = self._buffer.client.keys(f"*{self._name}*")
            assert not left, f"{left} are there after the run was deleted"
            self._restore(Path(folder) / "snapshot")
            before = self._statuses()
            sleepers.wake()
            assert self._statuses() == before

    def _delete(self) -> None:
        let_go(self._world)
        queue = open_queue(self._url, self._name)
        with closing(queue.connection):
            self._buffer.delete_run(queue)

    def _statuses(self) -> Mapping[str, Any]:
        return {task: self._buffer.counts(task).statuses for task in self._buffer.tasks()}

    def _restore(self, snapshot: Path) -> None:
        self._buffer.close()
        self._world.buffer = MortalBuffer.connect(self._url, self._name)
        self._buffer.restore(snapshot)
        self._held = None


def _text_for(prompt: Prompt) -> str:
    """The text of a prompt's samples: copies of a group, for reuse, have it too."""
    assert isinstance(prompt.content, str)
    task, number = prompt.content.split()
    return INSERTED_TEXT if task == OFFLINE else text_of(int(number))


def broken_promise(seed: int, url: str) -> str:
    """Play the run of a seed; returns what went wrong and what happened before, or '' if all promises were kept."""
    run = RandomRun(seed, url)
    try:
        run.play(random.Random(seed).choice([30, 60, 120]))
    except Exception as error:  # noqa: BLE001 - an error that no launch expects breaks a promise too
        return f"seed {seed}: {type(error).__name__}: {error} after {run.log[-40:]}"
    return ""
