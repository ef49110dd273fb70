"""Changes a task's rules while its run is alive. Pure."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.common.mappings import without
from rollq.buffer.common.toml_words import allowed_values
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.batch_sizes import Schedule, groups_at, share_by_weight
from rollq.buffer.rules.settings import CHANGEABLE_RULES, FIXED_RULES, TaskRules
from rollq.buffer.rules.shards import SHARED, split_rules

RULES: Final = set(TaskRules.model_fields)
_SIZES: Final = frozenset({"batch_groups", "schedule"})


@dataclass(frozen=True, slots=True)
class Revision:
    """One revision of a task's rules. The first revision has the rules that the task was created with. `step` is the
    first train step that was claimed, or can be, under these rules. `changes` maps rule names to the values before and
    after, as text. `by` names the host and process that asked for the change. If a new weight divided the whole batch
    again, `batch` has the group count of every task that was to change. `first_groups` is the number of groups in
    batches before any schedule.
    """

    number: int
    step: int
    time_s: float
    by: str
    changes: Mapping[str, tuple[str, str]]
    batch: Mapping[str, int] = field(default_factory=dict)
    first_groups: int = 0

    @property
    def text(self) -> str:
        """One line for display: the changes, by setting name, and the first step that has them."""
        changed, sizes = self._changed()
        parts = [part for part in (f"{changed} from step {self.step} on" if changed else "", sizes) if part]
        return f"revision {self.number}: {'; '.join(parts) or 'nothing changed'}"

    @property
    def what(self) -> str:
        """The changes alone; empty if nothing has changed."""
        return "; ".join(part for part in self._changed() if part)

    def _changed(self) -> tuple[str, str]:
        """The changed rules, and later steps' changed batch sizes; empty if nothing has changed."""
        sizes = list(self._sizes())
        changed = {name: f"{name} {before} -> {after}" for name, (before, after) in self.changes.items()}
        changed.pop("schedule", None)
        weight = [changed.pop("weight")] if sizes and "weight" in changed else []
        shared = " (shared by weight)" if sizes and self.batch and not weight else ""
        return ", ".join(changed.values()), ", ".join([*weight, *sizes]) + shared

    def _sizes(self) -> Iterator[str]:
        """The changed numbers of groups in batches, from the first step with a different number."""
        before, after = (_parse_schedule(text) for text in self.changes.get("schedule", ("none", "none")))
        former = (0, 0)
        for step in sorted(dict([*before, *after])):
            sizes = groups_at(self.first_groups, before, step), groups_at(self.first_groups, after, step)
            if sizes[0] != sizes[1] and sizes != former:
                yield f"batch_groups {sizes[0]} -> {sizes[1]} from step {step} on"
            elif sizes[0] == sizes[1] and former[0] != former[1]:
                yield f"as before from step {step} on"
            former = sizes


def digest_of_rules(rules: TaskRules) -> str:
    """A digest of the rules that differ from their defaults, the same in every release that knows them."""
    return hashlib.sha256(rules.model_dump_json(include=RULES, exclude_defaults=True).encode()).hexdigest()[:16]


def differences(before: TaskRules, after: TaskRules) -> dict[str, tuple[str, str]]:
    """Name of a rule -> its two values as users write them, for rules that differ."""
    return {
        name: (shown(getattr(before, name)), shown(getattr(after, name)))
        for name in TaskRules.model_fields
        if getattr(before, name) != getattr(after, name)
    }


def _parse_schedule(text: str) -> Schedule:
    """Parse the text that `shown` made from a schedule."""
    entries = [] if text == "none" else [entry.split(":") for entry in text.split(",")]
    return [(int(step), int(groups)) for step, groups in entries]


def shown(value: Any) -> str:
    """A rule's value as users write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(f"{step}:{groups}" for step, groups in value) or "none"
    return str(value).removesuffix(".0")


def changed_by_hand(rules: TaskRules, changes: Mapping[str, Any], step: int) -> TaskRules:
    """The rules with `changes` (name -> value or its text) applied. Batches use the new `batch_groups` from `step` on.

    Raises `ConfigError` naming a rule that is unknown, cannot change, or would be invalid.
    """
    for name in changes:
        _check_changeable(name)
    values = {name: None if value == "none" else value for name, value in changes.items()}
    groups = values.pop("batch_groups", None)
    changed = _validated(rules, values)
    if "batch_groups" in changes:
        wanted = _validated(rules, {"batch_groups": groups, "schedule": ((step, 1),)}).batch_groups
        later = _later_sizes(rules, step) if wanted else ()  # 0: the task is retired
        changed = _validated(changed, {"schedule": _schedule(rules, step, ((step, wanted), *later))})
    return _checked(rules, changed)


def _check_changeable(name: str) -> None:
    if name in FIXED_RULES:
        raise ConfigError(f"{name} cannot change during a run: {FIXED_RULES[name]}; start a new run to change it")
    changeable = [rule for rule in CHANGEABLE_RULES if rule != "schedule"]
    if name not in changeable:
        close = get_close_matches(name, changeable, n=1)
        known = f"did you mean {close[0]!r}?" if close else f"the rules are {', '.join(changeable)}"
        raise ConfigError(f"{name} is not a rule; {known}")


def changed_by_file(rules: TaskRules, former: TaskRules, file: TaskRules, step: int) -> TaskRules:
    """The rules with a settings file's edits, from `former` to `file`, applied.

    A rule that the file did not change keeps its value, even if it was changed by hand. Batches have the file's sizes
    from `step` on.

    Raises `ConfigError` naming a rule that cannot change.
    """
    edited = {name: getattr(file, name) for name in differences(former, file)}
    if former.token_threshold == file.token_threshold and file.max_token_staleness is None:
        edited.pop("max_token_staleness", None)  # the default is the number that the file had
    for name in edited:
        if name in FIXED_RULES:
            values = f"{shown(getattr(file, name))}, and the run has {shown(getattr(rules, name))}"
            raise ConfigError(
                f"{name} = {values}: it cannot change during a run, because {FIXED_RULES[name]}; change it back, or "
                "use a new run name"
            )
    changed = _validated(rules, without(edited, _SIZES))
    if _SIZES & edited.keys():
        sizes = ((step, file.groups_at(step)), *_later_sizes(file, step))
        changed = _validated(changed, {"schedule": _schedule(rules, step, sizes)})
    return _checked(rules, changed)


def _later_sizes(rules: TaskRules, step: int) -> list[tuple[int, int]]:
    """The schedule's entries after `step`."""
    return [(at, groups) for at, groups in rules.schedule if at > step]


def sizes_by_weight(
    tasks: Mapping[str, Sequence[TaskRules]], weights: Mapping[str, float], step: int
) -> dict[str, int]:
    """Divide the groups in the batch of `step` among tasks by `weights`; returns each task's number. Tasks without
    groups in it, such as retired tasks, get none.

    `tasks` maps each task to its shards' rules. Raises `ConfigError` if a later step already has other sizes, and for
    weights that cannot be used.
    """
    for task, shards in tasks.items():
        _check_no_later_sizes(task, shards, step)
    sizes = {task: sum(rules.groups_at(step) for rules in shards) for task, shards in tasks.items()}
    sharing = [(task, weight) for task, weight in weights.items() if sizes[task]]
    return dict.fromkeys(tasks, 0) | _shared(sum(sizes.values()), sharing)


def _check_no_later_sizes(task: str, shards: Sequence[TaskRules], step: int) -> None:
    if later := [entry for rules in shards for entry in _later_sizes(rules, step)]:
        raise ConfigError(
            f"weight: the schedule of task {task!r} changes the batch at step {min(later)[0]}; edit [batch] in "
            "rollq.toml instead"
        )


def _shared(groups: int, weights: Sequence[tuple[str, float]]) -> dict[str, int]:
    try:
        return share_by_weight(groups, weights)
    except ValueError as error:
        raise ConfigError(f"weight: {error}") from None


def unfinished_batch(
    tasks: Mapping[str, TaskRules], revisions: Mapping[str, Sequence[Revision]], step: int
) -> Mapping[str, int]:
    """The number of groups per task that the last new weight was to give to the batch of `step`, if the change was
    interrupted between two tasks; otherwise empty. `tasks` and `revisions` hold all tasks' rules and revisions. A task
    whose size was changed later counts as finished.
    """
    shared = [revision for of_task in revisions.values() for revision in of_task if revision.batch]
    last = max(shared, key=attrgetter("time_s"), default=None)
    if last is None:
        return {}
    unfinished = [task for task, groups in last.batch.items() if tasks[task].groups_at(step) != groups]
    is_settled = all(_has_new_sizes(revisions[task], last.time_s) for task in unfinished)
    return {} if is_settled else last.batch


def _has_new_sizes(revisions: Sequence[Revision], since_s: float) -> bool:
    return any("schedule" in revision.changes and revision.time_s > since_s for revision in revisions)


def for_shards(changes: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Divide a task's changes among its `count` shards, which share its group counts.

    Raises `ConfigError` for a number of groups that is not a whole number.
    """
    if count == 1:
        return [dict(changes)]
    try:
        return split_rules({name: int(value) if name in SHARED else value for name, value in changes.items()}, count)
    except ValueError:
        raise ConfigError(f"{', '.join(sorted(SHARED.keys() & changes.keys()))}: must be a whole number") from None


def _schedule(rules: TaskRules, step: int, sizes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The schedule in `rules` before `step`, and `sizes` from then on, without entries that change nothing."""
    changes: list[tuple[int, int]] = []
    for at, groups in [*(entry for entry in rules.schedule if entry[0] < step), *sizes]:
        if groups != groups_at(rules.batch_groups, changes, at):
            changes.append((at, groups))
    return tuple(changes)


def _validated(rules: TaskRules, changes: Mapping[str, Any]) -> TaskRules:
    try:
        return TaskRules.model_validate({**{name: getattr(rules, name) for name in TaskRules.model_fields}, **changes})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(": ".join([*map(str, first["loc"][:1]), allowed_values(first)])) from None


def _checked(before: TaskRules, after: TaskRules) -> TaskRules:
    shift = before.stale_threshold - before.token_threshold
    if after.stale_threshold - after.token_threshold != shift:
        raise ConfigError(
            f"max_staleness cannot change during a run, because max_token_staleness = {before.max_token_staleness} is "
            f"set: {FIXED_RULES['max_token_staleness']}"
        )
    if before.prompt_stats and not after.prompt_stats:
        raise ConfigError("prompt_stats cannot be switched off: the order of prompts may depend on its statistics")
    return after
