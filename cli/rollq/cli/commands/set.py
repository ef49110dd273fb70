"""`rollq set`: changes the rules of a live run."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollq.buffer.errors import ConfigError
from rollq.cli.options import connection_options, file_and

if TYPE_CHECKING:
    from rollq.buffer.buffer import Buffer
    from rollq.buffer.calls.replies.tasks import Clock
    from rollq.buffer.rules.settings import TaskRules

SHARED_MARGIN = 3
"""Further steps before a batch with new shares, so that all tasks change before the trainer reaches that batch."""
Changes = Mapping[str, Mapping[str, Any]]
"""The buffer's task -> rule name -> new value."""


@click.command("set")
@file_and(task="TASK", changes="[RULE=VALUE]...")
@connection_options
@click.option(
    "--from-step",
    type=click.IntRange(1),
    help="First train step with the new batch; default: the second that is not planned yet.",
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
def set_rules(
    file: Path | None,
    task: str,
    changes: tuple[str, ...],
    url: str | None,
    run_name: str | None,
    from_step: int | None,
    dry_run: bool,
) -> None:
    """Change rules of TASK while the run is alive; without RULE=VALUE, show its rules and how they changed.

    Every role follows without a restart. Rules hold from the next batch that is claimed; batch_groups from the second
    step that is not planned yet, as the trainer may be planning the first; weight three steps later. --from-step may
    name the step whose batch the trainer waits for: it gets the new size unless part of it is claimed.

    weight divides the groups of the whole batch again, so the batches of other tasks change too. A settings file that
    still has the old value does not change it back. batch_groups=0 retires TASK: its production ends, and its groups
    stay until they are too old.

    \b
    Example:
      rollq set rollq.toml math
      rollq set math max_staleness=2 batch_groups=64
      rollq set math weight=3 --from-step 200 --dry-run
      rollq set math batch_groups=0
    """
    from rollq.cli.run_location import find_run

    location = find_run(file, url, run_name)
    with location.without_payloads() as buffer:
        if changes:
            parsed = _parse(changes)
            _check_are_rules(parsed, task)
            _check_checkpoints(parsed, location.file)
            wanted = _wanted(buffer, task, parsed, from_step)
            _change(buffer, wanted, from_step, dry_run=dry_run, shared="weight" in parsed)
        else:
            _show(buffer, task)


def _check_are_rules(names: Iterable[str], task: str) -> None:
    """Raise `ConfigError` for a key of a task's table that is not a rule, since it takes effect only when a role reads
    the file."""
    from rollq.buffer.rules.settings import TaskRules
    from rollq.cli.settings.task_settings import TaskSettings
    from rollq.cli.settings.task_tables import place_of

    for name in names:
        if name in TaskSettings.model_fields and name not in TaskRules.model_fields:
            raise ConfigError(
                f"{name} is not a rule: change tasks.{task}.{place_of(name)} in the settings file, and restart the "
                "workers and the producer"
            )


def _check_checkpoints(changes: Mapping[str, str], file: Path | None) -> None:
    """Raise `ConfigError` if the trainer in the settings file would save too rarely for the new limit."""
    from rollq.cli.settings.file import load_settings

    try:
        most = float(changes["max_uncheckpointed_steps"])  # "+2" and "2.0" are numbers, too
    except (KeyError, ValueError):
        return  # absent, or refused with the other values
    trainer = load_settings(file).trainer if file else None
    if trainer and trainer.checkpoint_every > most:
        raise ConfigError(
            f"max_uncheckpointed_steps = {most:g}: must not be below trainer.checkpoint_every = "
            f"{trainer.checkpoint_every}, or the trainer stops before it saves a checkpoint"
        )


def _parse(changes: Sequence[str]) -> dict[str, str]:
    parsed: dict[str, str] = {}
    for change in changes:
        name, equals, value = change.partition("=")
        if not (name and equals and value):
            raise ConfigError(f"{change!r}: write it as RULE=VALUE, such as max_staleness=2")
        if name in parsed:
            raise ConfigError(f"{name} is given twice")
        parsed[name] = value
    return parsed


def _wanted(buffer: "Buffer", task: str, changes: Mapping[str, str], from_step: int | None) -> Changes:
    """The changes by the buffer's tasks: for all shards of `task`, or, for a weight, for all tasks."""
    from rollq.buffer.rules.revisions import for_shards
    from rollq.buffer.rules.shards import shards_among
    from rollq.cli.steering import shards_of

    own = dict(changes)
    sizes: dict[str, int] = {}
    if "weight" in own:
        if "batch_groups" in own:
            raise ConfigError("weight shares the groups of the batch, and batch_groups sets them: give one of them")
        sizes = _sizes_by_weight(buffer, task, own["weight"], from_step)
    by_task: dict[str, dict[str, Any]] = {name: {"batch_groups": groups} for name, groups in sizes.items()}
    by_task[task] = by_task.get(task, {}) | own
    tasks = buffer.train_tasks()
    wanted: dict[str, dict[str, Any]] = {}
    for name, values in by_task.items():
        shards = shards_among(tasks, name) if name in sizes else shards_of(buffer, tasks, name)
        wanted |= zip(shards, for_shards(values, len(shards)), strict=True)
    return wanted


def _sizes_by_weight(buffer: "Buffer", task: str, weight: str, from_step: int | None) -> dict[str, int]:
    from rollq.buffer.rules.revisions import changed_by_hand, sizes_by_weight, unfinished_batch
    from rollq.buffer.rules.shards import task_of

    rules = {name: buffer.rules(name) for name in buffer.train_tasks()}
    step = from_step or buffer.first_open_step() + SHARED_MARGIN
    interrupted = unfinished_batch(rules, {name: buffer.rule_revisions(name) for name in rules}, step)
    if interrupted:
        click.echo(
            f"an interrupted change of weights is undone: the batch has {sum(interrupted.values())} groups again"
        )
        rules |= {
            name: changed_by_hand(rules[name], {"batch_groups": groups}, step) for name, groups in interrupted.items()
        }
    tasks = {task_of(name): [rules[shard] for shard in rules if task_of(shard) == task_of(name)] for name in rules}
    try:
        weights = {name: shards[0].weight for name, shards in tasks.items()} | {task: float(weight)}
    except ValueError:
        raise ConfigError(f"weight = {weight}: must be a number") from None
    return sizes_by_weight(tasks, weights, step)


def _say(task: str, change: str) -> None:
    click.echo(f"task {task}: {change or 'no change'}")


def _planned_text(clock: "Clock", rules: "TaskRules", batch: Mapping[str, int] | None) -> str:
    """Describe the effect of a change; empty if nothing would change."""
    from rollq.buffer.rules.revisions import Revision, differences

    changes = differences(clock.rules, rules)
    numbers = clock.rules_revision + 1, clock.claimed_step + 1
    revision = Revision(*numbers, 0.0, "", changes, batch or {}, clock.rules.batch_groups)
    return f"{revision.text} (not changed: --dry-run)" if changes else ""


def _change(buffer: "Buffer", wanted: Changes, from_step: int | None, *, dry_run: bool, shared: bool = False) -> None:
    """Change the rules. All changes are checked before the first is made. With `shared`, they divide the batch
    again."""
    step = from_step or buffer.first_open_step() + (SHARED_MARGIN if shared else 0)
    planned = {task: buffer.plan_change(task, changes, batch_step=step) for task, changes in wanted.items()}
    size_change = _batch_change(buffer, {task: rules for task, (_, rules) in planned.items()}, step)
    changed: list[str] = []
    batch = {task: int(changes["batch_groups"]) for task, changes in wanted.items()} if shared else None
    for task, (clock, rules) in planned.items():
        if dry_run:
            _say(task, _planned_text(clock, rules, batch))
            continue
        try:
            made = buffer.change_rules(task, wanted[task], batch_step=step, batch=batch)
        except ConfigError as error:
            done = f"Only {', '.join(changed)} changed: " if changed else ""
            raise ConfigError(f"{error}. {done}repeat the command") from None
        changed.append(task)
        _say(task, made.text if made else "")
    if size_change:
        click.echo(f"{size_change} (not changed: --dry-run)" if dry_run else size_change)


def _batch_change(buffer: "Buffer", wanted: Mapping[str, Any], step: int) -> str:
    """A line about the new size, over all tasks, of the batch of `step`; empty without a new size.

    Raises `ConfigError` if no task is left in the batch.
    """
    from rollq.buffer.rules.batch_sizes import groups_at

    def size(rules: Mapping[str, "TaskRules"]) -> int:
        return sum(groups_at(each.batch_groups, each.schedule, step) for each in rules.values())

    rules = {task: buffer.rules(task) for task in buffer.train_tasks()}
    before, after = size(rules), size(rules | dict(wanted))
    if not after:
        raise ConfigError(
            f"batch_groups: no task would have a group in the batch of step {step}; stop the trainer instead"
        )
    return f"the batch of step {step} has {after} groups instead of {before}" if after != before else ""


def _show(buffer: "Buffer", task: str) -> None:
    from rollq.buffer.rules.revisions import shown
    from rollq.buffer.rules.settings import FIXED_RULES, TaskRules
    from rollq.cli.steering import shards_of

    for name in shards_of(buffer, buffer.tasks(), task):
        rules, step = buffer.rules(name), buffer.clock(name).step
        click.echo(f"task {name}")
        for rule in TaskRules.model_fields:
            fixed = "  (fixed)" if rule in FIXED_RULES else ""
            click.echo(f"  {rule} = {shown(getattr(rules, rule))}{_now(rules, rule, step)}{fixed}")
        for revision in buffer.rule_revisions(name):
            click.echo(f"  {revision.text}, by {revision.by}")


def _now(rules: "TaskRules", rule: str, step: int) -> str:
    """A task's groups in the next batch if `schedule` overrides `batch_groups`, or else empty."""
    from rollq.buffer.rules.batch_sizes import groups_at

    groups = groups_at(rules.batch_groups, rules.schedule, step)
    differs = rule == "batch_groups" and groups != rules.batch_groups
    return f"  ({groups} at step {step}, by schedule)" if differs else ""
