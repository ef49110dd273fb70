"""Converts Trinity-RFT's YAML to `rollq.toml`: settings of the whole run. Tasks are in `trinity_tasks.py`."""

import math
from pathlib import Path
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import MAX_BATCH_GROUPS
from rollq.cli.settings.migration.arguments import Arguments
from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.names import plain_name
from rollq.cli.settings.migration.table import system
from rollq.cli.settings.migration.trinity_algorithm import Algorithm, convert_algorithm
from rollq.cli.settings.migration.trinity_engine import convert_engine
from rollq.cli.settings.migration.trinity_source import ENOUGH_STEPS, Source, text_of
from rollq.cli.settings.migration.trinity_tasks import Limits, convert_taskset, offline_task
from rollq.cli.settings.migration.trinity_trainer import convert_checkpoints, convert_learning
from rollq.cli.settings.migration.values import Placeholder
from rollq.cli.settings.migration.written import Path as Place

FEWEST_TABLES: Final = 3
"""A Trinity file has at least this many of Trinity's tables. Files of many systems have one, such as `model`."""
OFFLINE: Final = {"sft": "sft", "cpt": "sft", "dpo": "dpo"}


def checked(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    """A file's content. Raises `ConfigError` for a file that is not Trinity-RFT's."""
    known = set(system("trinity").groups["Config"])
    if "actor_rollout_ref" in data and "buffer" not in data:
        raise ConfigError(
            f"{path}: settings of verl, named by `trainer_config_path` of Trinity-RFT; convert the file that names them"
        )
    if len(known & data.keys()) < FEWEST_TABLES:
        raise ConfigError(
            f"{path}: neither settings of Trinity-RFT nor of XTuner; of the tables of Trinity-RFT it has "
            f"{', '.join(sorted(known & data.keys())) or 'none'}"
        )
    return data


def convert(path: Path, data: dict[str, Any]) -> Conversion:
    """The new file for a Trinity file's content."""
    run, source = Conversion(system("trinity")), Source(data)
    _names(run, source, path)
    algorithm = convert_algorithm(run, source.algorithm)
    limits = _limits(run, source)
    places = _tasks(run, source, algorithm, limits)
    for at in places:
        _staleness(run, source, at)
    _duration(run, source, places)
    _replaying(run, source.replay, places)
    convert_engine(run, source, limits)
    convert_learning(run, source, limits)
    convert_checkpoints(run, source, places)
    _watching(run, source)
    run.copy(source.explorer)
    run.copy(source.timeout)
    run.copy(source.experience)
    for given in source.all:
        run.rest(given)
    return run


def _names(run: Conversion, source: Source, path: Path) -> None:
    root = source.root
    parts = {name: text_of(run.take(root, name)) for name in ("project", "group", "name")}
    title = "-".join(filter(None, (parts["project"], parts["name"])))
    run.put(root, "name", "run", plain_name(title or path.stem, 64))
    folder = text_of(run.take(root, "checkpoint_root_dir"), "checkpoints")
    output = "/".join([folder.rstrip("/") or "checkpoints", *filter(None, parts.values())])
    has_variables = isinstance(root.fields.get("checkpoint_root_dir"), Placeholder)
    run.put(root, "checkpoint_root_dir", "trainer.output", Placeholder(output) if has_variables else output)


def _limits(run: Conversion, source: Source) -> Limits:
    """Numbers of prompt and response tokens. Trinity derives a missing number from the longest sequence."""
    names = ("max_model_len", "max_prompt_tokens", "max_response_tokens")
    whole, prompt, response = (run.whole(source.model, name) for name in names)
    if whole is not None:
        prompt, response = _divided(whole, prompt, response)
    prompt, response = max(prompt or 2048, 1), max(response or 2048, 1)
    return Limits(whole or prompt + response, prompt, response)


def _divided(whole: int, prompt: int | None, response: int | None) -> tuple[int, int]:
    """Prompt and response tokens of a sequence of `whole` tokens."""
    if response is None:
        prompt = whole // 2 if prompt is None else prompt
        return prompt, whole - min(prompt, whole - 1)
    return whole - min(response, whole - 1) if prompt is None else prompt, response


def _tasks(run: Conversion, source: Source, algorithm: Algorithm, limits: Limits) -> list[Place]:
    """The tables of tasks and evaluations. Returns the places of tasks."""
    places = [
        convert_taskset(run, source.input, source.model, source.engine, table, "tasks", algorithm, limits)
        for table in _tasksets(source, algorithm)
    ]
    if not places:
        places = [offline_task(run, source.experience, algorithm, limits)]
    _filters(run, source.pipeline, places)
    _equal_rewards(run, source.algorithm, algorithm.advantage_arguments, places)
    _batches(run, source, places, algorithm)
    for table in _tables(source.input.fields.get("eval_tasksets")):
        convert_taskset(run, source.input, source.model, source.engine, table, "evaluations", algorithm, limits)
    source.input.taken |= {"taskset", "tasksets", "eval_tasksets"}
    for name in ("default_workflow_type", "default_eval_workflow_type", "default_reward_fn_type"):
        run.take(source.input, name)
    if source.root.fields.get("mode") == "bench":
        run.written.note(
            (*places[0], "prompts"), "`rollq evaluate` runs the evaluations; rollq.toml needs a task as well"
        )
    return places


def _tasksets(source: Source, algorithm: Algorithm) -> list[dict[str, Any]]:
    """The tables of prompts to train on."""
    fields = source.input.fields
    if source.root.fields.get("mode") == "train" and algorithm.kind in OFFLINE:
        return []
    return [*_tables([fields.get("taskset")]), *_tables(fields.get("tasksets"))]


def _tables(value: Any) -> list[dict[str, Any]]:
    """The tables in a list; none for any other value."""
    return [table for table in value if isinstance(table, dict)] if isinstance(value, list) else []


def _batches(run: Conversion, source: Source, places: list[Place], algorithm: Algorithm) -> None:
    groups, note = _groups(run, source.buffer, algorithm)
    if len(places) == 1:
        run.put(source.buffer, "batch_size", "tasks.NAME.batch_groups", groups, places[0], note)
    else:
        run.put(
            source.buffer, "batch_size", "batch.groups", groups, note=note or "Trinity takes turns through the tasksets"
        )


def _groups(run: Conversion, buffer: Given, algorithm: Algorithm) -> tuple[int, str]:
    """The number of groups in a batch, and a note on the difference from Trinity's batch."""
    size, experiences = run.positive(buffer, "batch_size") or 1, run.positive(buffer, "train_batch_size")
    if experiences is None:
        groups, note = size, ""
    elif algorithm.counts_otherwise:
        groups, note = (
            size,
            f"prompts; train_batch_size = {experiences} also counts turns of samples, or samples of experts",
        )
    else:
        groups = max(1, round(experiences / algorithm.group_size))
        whole = "" if groups * algorithm.group_size == experiences else ", rounded"
        note = (
            ""
            if groups == size
            else f"train_batch_size = {experiences}, by {algorithm.group_size} samples of a prompt{whole}"
        )
    if groups > MAX_BATCH_GROUPS:
        return MAX_BATCH_GROUPS, f"{groups} in Trinity; a batch has at most {MAX_BATCH_GROUPS}"
    return groups, note


def _filters(run: Conversion, pipeline: Given, places: list[Place]) -> None:
    """Convert operators of the experience pipeline that are filters in rollq."""
    operators = pipeline.fields.get("operators")
    known = {"dapo_dynamic_sampling": "zero_advantage", "mask_response_truncated": "overlong"}
    if not isinstance(operators, list):
        return
    pipeline.taken.add("operators")
    for place, operator in enumerate(_tables(operators)):
        given = Given("OperatorConfig", operator, f"{pipeline.where}operators[{place}].")
        name = text_of(run.take(given, "name"))
        if name in known:
            _add_filter(run, given, "name", places, known[name])
        else:
            run.leave(given, "name", "rollq has no such operator: write a filter, or a group judge that shapes rewards")
        run.rest(given)


def _add_filter(run: Conversion, given: Given, setting: str, places: list[Place], name: str, note: str = "") -> None:
    for at in places:
        filters = run.written.values.get((*at, "filters"), [])
        run.put(given, setting, "tasks.NAME.filters", list(dict.fromkeys([*filters, name])), at, note)


def _equal_rewards(run: Conversion, given: Given, arguments: Arguments, places: list[Place]) -> None:
    """Groups that Trinity's advantages leave out."""
    threshold = arguments.number("std_threshold")
    arguments.rest()
    if threshold is not None:
        note = "" if threshold == 0 else f"of equal rewards; in Trinity of a deviation up to {threshold:g}"
        _add_filter(run, given, "advantage_fn_args", places, "zero_advantage", note)


def _staleness(run: Conversion, source: Source, at: Place) -> None:
    interval = _interval(run, source.sync, at)
    offset, style = run.whole(source.sync, "sync_offset") or 0, run.word(source.sync, "sync_style")
    bound = _bound(run, source.algorithm)
    if _is_offline(run, at):
        return
    if bound is not None:
        steps, note = math.ceil(bound / interval), "in syncs, of staleness_control's steps"
        run.put(source.algorithm, "sample_strategy_args", "tasks.NAME.max_staleness", steps, at, note)
    elif style in (None, "fixed") or offset:
        note = "" if offset % interval == 0 else f"{offset} steps in Trinity, in syncs of {interval}"
        run.put(source.sync, "sync_offset", "tasks.NAME.max_staleness", math.ceil(offset / interval), at, note)
    else:
        run.set("tasks.NAME.max_staleness", 2, at, f"sync_style = {style} has no bound in Trinity; rollq needs one")


def _interval(run: Conversion, sync: Given, at: Place) -> int:
    """Steps between two syncs of the weights."""
    shared, own = run.whole(sync, "sync_interval"), run.whole(sync, "trainer_sync_interval")
    name, steps = ("trainer_sync_interval", own) if own is not None else ("sync_interval", shared)
    interval = max(steps or 1, 1)
    run.put(sync, name, "tasks.NAME.staleness.sync_weights_interval", interval, at)
    return interval


def _is_offline(run: Conversion, at: Place) -> bool:
    return (*at, "offline") in run.written.values


def _bound(run: Conversion, algorithm: Given) -> int | None:
    """How many steps a sample may be behind: one less than in `staleness_control`."""
    arguments = Arguments.of(run, algorithm, "sample_strategy_args")
    if run.word(algorithm, "sample_strategy") != "staleness_control":
        if arguments.get("expert_data_ratio") is not None:
            run.leave(algorithm, "sample_strategy_args", "experts have the share of their offline task in a batch")
        arguments.rest()
        return None
    steps = arguments.number("max_staleness")
    arguments.rest()
    return max(int(steps) - 1, 0) if steps is not None and math.isfinite(steps) else None


def _duration(run: Conversion, source: Source, places: list[Place]) -> None:
    trainer, buffer = source.trainer, source.buffer
    of_trainer, of_buffer = run.whole(trainer, "total_steps"), run.whole(buffer, "total_steps")
    if steps := run.positive(trainer, "total_steps") or run.positive(buffer, "total_steps"):
        run.put(trainer if steps == of_trainer else buffer, "total_steps", "trainer.steps", steps)
    else:
        run.set("trainer.steps", ENOUGH_STEPS, note=_end(run, places))
    epochs = run.positive(buffer, "total_epochs")
    for at in places if of_buffer is None else ():
        key = "tasks.NAME.batches.max_uses" if _is_offline(run, at) else "tasks.NAME.curriculum.passes"
        run.put(buffer, "total_epochs", key, epochs, at)


def _end(run: Conversion, places: list[Place]) -> str:
    """A note on the end of a run without a number of steps in the file."""
    if all(_is_offline(run, at) for at in places):
        return "replace: the samples that you import x batches.max_uses / batch_groups"
    return "training ends after the passes over the prompts"


def _replaying(run: Conversion, replay: Given, places: list[Place]) -> None:
    """The order of batches from Trinity's priority queue."""
    enabled = run.flag(replay, "enable")
    for at in places if enabled else ():
        if not _is_offline(run, at):
            run.put(replay, "enable", "tasks.NAME.batches.order", "newest", at)


def _watching(run: Conversion, source: Source) -> None:
    kind = run.word(source.monitor, "monitor_type")
    if kind in ("tensorboard", "wandb", "mlflow"):
        run.put(source.monitor, "monitor_type", "trainer.trackers", [kind])
    else:
        run.leave(source.monitor, "monitor_type", "rollq has tensorboard, wandb and mlflow")
    project = text_of(source.root.fields.get("project"))
    if project and kind in ("wandb", "mlflow"):
        key = "trainer.wandb.project" if kind == "wandb" else "trainer.mlflow.experiment"
        run.put(source.root, "project", key, project)
