"""A run's tasks and their rules: creates them, and changes the rules of a live run."""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Any

import orjson

from rollq.buffer.calls.inspection import Inspection
from rollq.buffer.calls.replies.tasks import Clock
from rollq.buffer.errors import ConfigError, RunMismatch
from rollq.buffer.rules.codec import decode_rules, encode_rules
from rollq.buffer.rules.revisions import Revision, changed_by_file, changed_by_hand, differences, digest_of_rules
from rollq.buffer.rules.settings import TaskRules

log = logging.getLogger(__name__)

_RULES_MOVED = -1
"""A function's reply if the rules changed after its caller read them."""


class Registry(Inspection):
    """Calls that create tasks and change their rules."""

    def register_task(self, task: str, rules: TaskRules) -> None:
        """Create the task with a settings file's rules, or apply that file's edits to the task's rules.

        A rule that was not edited keeps its current value, even if `change_rules` set it. A file is outdated if the run
        once had the file's rules and now has others: the run keeps its rules, and the call logs a warning. Raises
        `RunMismatch` naming a rule that cannot change, and `StoreLost` if the server lacks a task of the run, for
        example after one server in a cluster came back empty.

        The task is listed only once it has a clock, so a role that dies in between leaves no half-made task.
        """
        if task in self.tasks():
            self.clock(task)
        else:
            self._discard_leftover(task)
        rules = decode_rules(encode_rules(rules))  # with the defaults that depend on other rules
        encoded = [item for pair in encode_rules(rules).items() for item in pair]
        epoch = self.call_task(
            "register_task", task, self.keys.events, *self._live_epoch(), *encode_record({}, rules), *encoded
        )
        self.call("add_task", self.keys.info, self.incarnation, task)
        if epoch < self._live_epoch().epoch:  # a trainer that did not find the task in the list began the epoch
            self._carry_epoch(task)
        self._follow_file(task, rules)

    def plan_change(
        self, task: str, changes: Mapping[str, Any], *, batch_step: int | None = None
    ) -> tuple[Clock, TaskRules]:
        """The task's current clock, and the rules that `change_rules` would give it. Raises the same errors."""
        first, clock = self.first_open_step(), self.clock(task)
        if batch_step is not None and batch_step <= self._claimed_step():
            raise ConfigError(
                f"step {batch_step}: its batch is already claimed; use {self._claimed_step() + 1} or more"
            )
        wanted = changed_by_hand(clock.rules, changes, batch_step or first)
        most, held = wanted.max_uncheckpointed_steps, clock.claimed_step - clock.checkpoint
        if most < clock.rules.max_uncheckpointed_steps and most < held:
            raise ConfigError(
                f"max_uncheckpointed_steps = {most}: the batches of {held} steps wait for the next checkpoint; wait "
                f"too, or use {held} or more"
            )
        return clock, wanted

    def change_rules(
        self,
        task: str,
        changes: Mapping[str, Any],
        *,
        batch_step: int | None = None,
        batch: Mapping[str, int] | None = None,
    ) -> Revision | None:
        """Change a task's rules (name -> value or its text) for all later claims; returns None if nothing changes.

        `batch_groups` changes at train step `batch_step`, by default `first_open_step`. This may be the step whose
        batch the trainer waits for: that batch gets the new size unless part of it is claimed. All roles follow without
        a restart. For the record, `batch` has the groups of all tasks whose sizes change together. Raises `ConfigError`
        naming a rule that cannot change this way.
        """
        replaced = False
        while not replaced:
            clock, wanted = self.plan_change(task, changes, batch_step=batch_step)
            if wanted == clock.rules:
                return None
            replaced = self._replace(task, clock, wanted, batch=batch)
        return self.rule_revisions(task)[-1]

    def first_open_step(self) -> int:
        """The first train step whose batch size may still change.

        A trainer may be planning the next step at this moment, so this is the step after the next; step 1 before the
        first trainer.
        """
        step = self._claimed_step() + 1
        while self.send("EXISTS", self.keys.plan(step)):
            step += 1
        return step + 1 if self._live_epoch().epoch else step

    def _claimed_step(self) -> int:
        """The last step with a claimed group; 0 before the first."""
        return max((clock.claimed_step for clock in self.clocks(self.tasks()).values()), default=0)

    def _follow_file(self, task: str, file: TaskRules) -> None:
        settled = False
        while not settled:
            records = self._rule_records(task)
            clock = self.clock(task)
            former = decode_rules(orjson.loads(records[b"file"]))
            if not differences(former, file):
                return
            if f"seen:{digest_of_rules(file)}".encode() in records:
                newer = ", ".join(f"{name} = {value}" for name, (_, value) in differences(file, former).items())
                log.warning(
                    "task %s: this settings file is older than the file of other roles, which has %s. The run keeps "
                    "its rules; copy the newer file here, or change a rule back with `rollq set`",
                    task,
                    newer,
                )
                return
            try:
                wanted = changed_by_file(clock.rules, former, file, self.first_open_step())
            except ConfigError as error:
                raise RunMismatch(f"task {task!r}: {error}") from None
            settled = self._replace(task, clock, wanted, file)
        log.warning("task %s: its settings were edited: %s", task, self.rule_revisions(task)[-1].text)

    def _replace(
        self,
        task: str,
        clock: Clock,
        wanted: TaskRules,
        file: TaskRules | None = None,
        batch: Mapping[str, int] | None = None,
    ) -> bool:
        """Replace the rules in `clock`; returns False if another role changed them after `clock` was read."""
        before, after = encode_rules(clock.rules), encode_rules(wanted)
        fields = [item for name, value in after.items() if before[name] != value for item in (name, value)]
        record = encode_record(differences(clock.rules, wanted), file, batch)
        if self.call_task("change_rules", task, clock.rules_revision, *record, *fields) == _RULES_MOVED:
            return False
        self.clock(task)
        return True


def encode_record(
    changes: Mapping[str, tuple[str, str]], file: TaskRules | None, batch: Mapping[str, int] | None = None
) -> tuple[bytes, bytes, str]:
    """The arguments `record`, `file` and `digest` for the functions that change rules."""
    shared = {"batch": dict(batch)} if batch else {}
    record = orjson.dumps({"changes": changes, "by": f"{socket.gethostname()}:{os.getpid()}", **shared})
    return (record, orjson.dumps(encode_rules(file)), digest_of_rules(file)) if file else (record, b"", "")
