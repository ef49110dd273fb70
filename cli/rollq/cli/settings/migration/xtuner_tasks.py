"""XTuner's tasks and evaluations as tables `[tasks.NAME]` and `[evaluations.NAME]`."""

import re
from typing import Any, Final

from rollq.cli.settings.migration.conversion import UNREAD, Conversion, Given
from rollq.cli.settings.migration.names import dotted
from rollq.cli.settings.migration.table import system
from rollq.cli.settings.migration.values import REST, Made, Named, Placeholder, Several, Unknown, are_all
from rollq.cli.settings.migration.xtuner_judges import convert_judge

Place = tuple[str, ...]
SYNC: Final = "SyncProduceStrategyConfig"


def made(value: Any, role: str) -> Given:
    """The settings in a value. An unknown class has the settings of its role."""
    if isinstance(value, Made):
        known = value.group in system("xtuner").groups
        if known and not _is_like(value.group, role):
            return Given(role, {REST: value}, f"{role}.")
        return Given(value.group if known else role, value.fields, f"{value.group}.")
    return Given(role, (value or {}) if isinstance(value, dict | None) else {REST: value}, f"{role}.")


def _is_like(group: str, role: str) -> bool:
    """Whether a class can replace another: both inherit from the same class, or their names end alike."""
    bases = system("xtuner").bases
    roots = [group, role]
    for place, name in enumerate(roots):
        while name in bases:
            name = bases[name]
        roots[place] = name
    ends = [re.findall("[A-Z][a-z]+", name)[-2:] for name in (group, role)]
    return roots[0] == roots[1] or ends[0] == ends[1]


def convert_task(run: Conversion, spec: Made, number: int) -> tuple[Place, bool]:
    """Convert one table `[tasks.NAME]`. Returns the table's place, and whether the task is produced asynchronously."""
    task = made(spec, "TaskSpecConfig")
    at = ("tasks", _name(run, task, "tasks"))
    strategy = made(task.fields.get("produce_strategy_config"), SYNC)
    if "produce_strategy_config" not in task and task.group == "DisaggTaskSpecConfig":
        strategy.group = "DisaggAsyncProduceStrategyConfig"
    weight = run.number(task, "weight")
    if number > 1:
        run.put(task, "weight", "tasks.NAME.batches.weight", weight, at)
    loop = _samples(run, task, at)
    _strategy(run, strategy, at)
    if REST in strategy.fields:
        for path in (("producer", "strategy"), (*at, "max_staleness")):
            run.written.note(path, UNREAD)
    convert_judge(run, task, at)
    _group(run, task, at)
    task.taken |= {"produce_strategy_config", "agent_loop_config", "judger_config", "sampler_config", "task_name"}
    for given in (strategy, loop, task):
        run.rest(given)
    return at, strategy.group != SYNC


def convert_evaluation(run: Conversion, spec: Made) -> None:
    """One table `[evaluations.NAME]`."""
    task = made(spec, "TaskSpecConfig")
    at = ("evaluations", _name(run, task, "evaluations"))
    loop = _samples(run, task, at)
    convert_judge(run, task, at)
    _group(run, task, at)
    task.taken |= {"produce_strategy_config", "agent_loop_config", "judger_config", "sampler_config", "task_name"}
    task.taken.add("weight")
    run.rest(loop)
    run.rest(task)


def _name(run: Conversion, task: Given, root: str) -> str:
    """A name that no other task or evaluation has."""
    given = run.word(task, "task_name")
    return run.written.free_name(given if isinstance(given, str) else root.removesuffix("s"))


def _group(run: Conversion, task: Given, at: Place) -> None:
    """Prompts and group size."""
    sampler = made(task.fields.get("sampler_config"), "SamplerConfig")
    run.copy(sampler, at)
    loader = made(sampler.fields.get("dataloader_cfg"), "DataloaderConfig")
    sampler.taken.add("dataloader_cfg")
    first, number = _data_sets(run, loader)
    rows = made(first.get("dataset"), "DatasetConfig")
    _prompts(run, rows, at, number)
    _columns(run, made(first.get("tokenize_fn"), "RLTextTokenizeFnConfig"), at)
    for given in (rows, loader, sampler):
        run.rest(given)


def _data_sets(run: Conversion, loader: Given) -> tuple[dict[str, Any], int]:
    """A loader's first data set, and its number of data sets."""
    sources = run.take(loader, "dataset_config_list")
    entries = list(sources) if isinstance(sources, list | tuple) else [] if sources is None else [sources]
    first: Any = next(iter(entries), {})
    first = first.like if isinstance(first, Several) else first
    if isinstance(first, dict) and are_all(dict | Several, entries):
        return first, len(entries)
    run.refuse(loader, "dataset_config_list", "known only when the file runs")
    return first if isinstance(first, dict) else {}, len(entries)


def _prompts(run: Conversion, rows: Given, at: Place, files: int) -> None:
    path = run.take(rows, "anno_path")
    note = "XTuner joins several data sets here: write one file, or a task for each" if files > 1 else ""
    if not isinstance(path, str | Placeholder):
        path, note = "prompts.jsonl", "replace: known only when the XTuner file runs"
    run.put(rows, "anno_path", "tasks.NAME.prompts", path, at, note)
    folder = run.take(rows, "media_root")
    if isinstance(folder, str | Placeholder) and folder not in ("", "/"):
        folder_text = folder if isinstance(folder, str) else folder.text
        run.put(rows, "media_root", "tasks.NAME.rows.image_folders", [folder_text], at)
    if run.flag(rows, "enable_sequential_sampler") is True:
        run.put(rows, "enable_sequential_sampler", "tasks.NAME.curriculum.prompt_order", "file", at)


def _columns(run: Conversion, tokenizer: Given, at: Place) -> None:
    run.set("tasks.NAME.rows.answer_field", "reward_model.ground_truth", at, "the form of XTuner's rows")
    run.copy(tokenizer, at)
    thinking = run.flag(tokenizer, "enable_thinking") if "enable_thinking" in tokenizer else None
    if thinking is not None:
        run.put(tokenizer, "enable_thinking", "tasks.NAME.rows.template_options", {"enable_thinking": thinking}, at)
    given = [name for name in ("min_pixels", "max_pixels") if run.whole(tokenizer, name) is not None]
    if given:
        pixels = {name: run.whole(tokenizer, name) for name in given}
        run.put(tokenizer, given[0], "tasks.NAME.rows.image_options", pixels, at)
    run.rest(tokenizer)


def _samples(run: Conversion, task: Given, at: Place) -> Given:
    """Sampling parameters and the agent loop."""
    config = task.fields.get("agent_loop_config")
    loop = made(config, "AgentLoopConfig")
    run.copy(params := made(loop.fields.get("sample_params"), "SampleParams"), at)
    loop.taken.add("sample_params")
    if run.written.values.get((*at, "temperature")) == 0 and at[0] == "tasks":
        run.written.drop((*at, "temperature"), "all samples of a group would be the same")
    run.rest(params)
    _agent_loop(run, loop, config.group if isinstance(config, Made) else "SingleTurnAgentLoopConfig", at)
    return loop


def _agent_loop(run: Conversion, loop: Given, name: str, at: Place) -> None:
    match name:
        case "SingleTurnAgentLoopConfig":
            pass
        case "GSM8KToolAgentLoopConfig":
            turns = run.whole(loop, "max_turns") or 8
            options = {"tools": {"calculate": {"function": "tools.calculate"}}, "max_turns": turns}
            note = "write the tools in tools.py: docs/guide/agents.md"
            run.set("tasks.NAME.agent_loop", "tools", at)
            run.put(loop, "max_turns", "tasks.NAME.agent_options", options, at, note)
        case "AgentInLocalhostLoopConfig" | "AgentInSandboxLoopConfig":
            _harness(run, loop, at)
        case _:
            note = f"{name} in XTuner: write this loop: docs/guide/agents.md"
            run.set("tasks.NAME.agent_loop", dotted(name.removesuffix("Config"), "loops"), at, note)


def _harness(run: Conversion, loop: Given, at: Place) -> None:
    options: dict[str, Any] = {"command": ["python", "agent.py"]}
    for name, option in (("max_concurrent_samples", "concurrent"), ("sample_timeout_s", "timeout_s")):
        if name in loop and (value := run.number(loop, name)) is not None:
            options[option] = value
    run.set("tasks.NAME.agent_loop", "harness", at)
    run.set(
        "tasks.NAME.agent_options",
        options,
        at,
        "replace: the program of the agent; XTuner's concurrency limits the run, this limits a worker",
    )


def _strategy(run: Conversion, strategy: Given, at: Place) -> None:
    if strategy.group == SYNC:
        run.set("tasks.NAME.max_staleness", 0, at)
    else:
        run.copy(strategy, at)
        run.written.values.setdefault((*at, "max_staleness"), 0)
        surplus = run.number(strategy, "over_sample_threshold")
        if surplus is not None:
            before = run.written.values.get(("producer", "over_sample"), 0.0)
            note = "one for all tasks; the largest" if before not in (0.0, surplus) else ""
            run.put(strategy, "over_sample_threshold", "producer.over_sample", max(before, float(surplus)), note=note)
        _token_staleness(run, strategy, at)
    check = strategy.fields.get("is_valid_sample_fn")
    if isinstance(check, Named | Unknown):
        strategy.taken.add("is_valid_sample_fn")
        name = check.name if isinstance(check, Named) else check.text
        note = "write it, or zero_advantage if it drops groups of equal rewards"
        run.put(strategy, "is_valid_sample_fn", "tasks.NAME.filters", [dotted(name, "filters")], at, note)
        run.converted += 1


def _token_staleness(run: Conversion, strategy: Given, at: Place) -> None:
    tokens, groups = run.whole(strategy, "max_token_staleness"), run.written.values[*at, "max_staleness"]
    if tokens is not None and tokens <= groups:
        run.put(strategy, "max_token_staleness", "tasks.NAME.staleness.max_token_staleness", tokens, at)
    elif tokens is not None:
        run.leave(strategy, "max_token_staleness", f"tokens never get older than max_staleness = {groups}")
