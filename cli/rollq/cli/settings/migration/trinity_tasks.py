"""Trinity-RFT's tasksets as tables `[tasks.NAME]` and `[evaluations.NAME]`."""

from dataclasses import dataclass
from typing import Any, Final

from rollq.cli.settings.migration.arguments import Arguments
from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.names import dotted
from rollq.cli.settings.migration.readings import a_text
from rollq.cli.settings.migration.trinity_algorithm import Algorithm
from rollq.cli.settings.migration.trinity_source import below
from rollq.cli.settings.migration.values import Placeholder
from rollq.cli.settings.migration.written import Path as Place


@dataclass(frozen=True, slots=True)
class Limits:
    """The most tokens of a whole sequence, of a prompt and of a response."""

    whole: int
    prompt: int
    response: int


ONE_TURN: Final = frozenset(
    f"{start}{name}_workflow"
    for start in ("", "async_")
    for name in ("simple", "math", "math_boxed", "math_eval", "math_rm", "math_ruler", "simple_mm")
) | {
    "math_trainable_ruler_workflow",
    "rubric_judge_workflow",
    "on_policy_distill_workflow",
    "on_policy_distill_math_workflow",
}
"""Workflows that ask the model once."""
OWN_PROMPT: Final = frozenset(
    {"math_workflow", "async_math_workflow", "math_boxed_workflow", "async_math_boxed_workflow", "math_eval_workflow"}
)
"""Workflows with a system prompt, if the format has none."""
JUDGES: Final = frozenset({"math_reward", "math_boxed_reward", "accuracy_reward", "math_dapo_reward"})
"""Reward functions that are rollq's judge `math`."""
_PAIRS: Final = (
    "DPO in Trinity: `rollq train` has no loss for pairs, and this only imitates; examples/losses/dpo.py has it"
)
ORDERS: Final = {"sequential": "file", "shuffle": "shuffle", "random": "random", "difficulty_based": "difficulty"}


def convert_taskset(
    run: Conversion,
    owner: Given,
    model: Given,
    engine: Given,
    table: dict[str, Any],
    root: str,
    algorithm: Algorithm,
    limits: Limits,
) -> Place:
    """Convert a task's or an evaluation's table. Returns the table's place."""
    setting = "taskset" if root == "tasks" else "eval_tasksets"
    at = (root, run.written.free_name(a_text(table.get("name")) or setting.removesuffix("s")))
    given = Given("TasksetConfig", table, f"{owner.where}{setting}[{at[1]}].")
    form = below(given, "format", "FormatConfig")
    sampling = below(given, "rollout_args", "GenerationConfig")
    selector = below(given, "data_selector" if "data_selector" in given else "task_selector", "DataSelectorConfig")
    run.take(given, "name")
    _prompts(run, given, at)
    _size(run, given, at, algorithm)
    _sampling(run, model, engine, sampling, at, limits)
    _columns(run, form, at, limits)
    _thinking(run, (form, engine, model), at)
    _workflow(run, owner, given, form, at)
    if root == "tasks":
        _order(run, selector, at)
    for part in (form, sampling, selector, given):
        run.rest(part)
    return at


def offline_task(run: Conversion, buffer: Given, algorithm: Algorithm, limits: Limits) -> Place:
    """The task of a run whose samples come from a file."""
    at = ("tasks", run.written.free_name(str(buffer.fields.get("name") or "samples")))
    if algorithm.kind in ("sft", "cpt", "dpo"):
        run.set("tasks.NAME.offline", True, at, "fill it with `rollq import`")
        run.set("trainer.loss.sft", {at[1]: 1.0}, note=_PAIRS if algorithm.kind == "dpo" else "")
        note = "samples of a row of the file"
    else:
        run.set("tasks.NAME.prompts", "prompts.jsonl", at, "replace: the file has no taskset")
        note = ""
    run.set("tasks.NAME.group_size", algorithm.group_size, at, note)
    run.set("tasks.NAME.max_tokens", limits.response, at)
    run.set("tasks.NAME.rows.max_prompt_tokens", limits.prompt, at)
    return at


def _prompts(run: Conversion, given: Given, at: Place) -> None:
    path, split = run.take(given, "path"), run.take(given, "split")
    subset = given.fields.get("subset_name")
    if not isinstance(path, str | Placeholder):
        path, note = "prompts.jsonl", "replace: the taskset has no known path"
    else:
        text = path if isinstance(path, str) else path.text
        is_file = text.endswith((".jsonl", ".json", ".parquet", ".arrow"))
        loaded = f", {subset!r}" if isinstance(subset, str) else ""
        note = (
            ""
            if is_file
            else f"a file, or the folder of load_dataset({text!r}{loaded}, split={split!r}).save_to_disk(folder)"
        )
    run.put(given, "path", "tasks.NAME.prompts", path, at, note)


def _size(run: Conversion, given: Given, at: Place, algorithm: Algorithm) -> None:
    if at[0] == "tasks":
        note = "" if algorithm.repeat_times > 1 else "rollq's groups need two samples to compare"
        run.set(
            "tasks.NAME.group_size",
            max(algorithm.group_size, 1 if algorithm.takes_single else 2),
            at,
            "" if algorithm.takes_single else note,
        )
        run.whole(given, "repeat_times")
    else:
        run.put(given, "repeat_times", "tasks.NAME.group_size", run.positive(given, "repeat_times") or 1, at)


def _sampling(run: Conversion, model: Given, engine: Given, sampling: Given, at: Place, limits: Limits) -> None:
    for name, key in (
        ("temperature", "tasks.NAME.temperature"),
        ("top_p", "tasks.NAME.sampling.top_p"),
        ("top_k", "tasks.NAME.sampling.top_k"),
    ):
        _choice_of_tokens(run, model if sampling.fields.get(name) is None else sampling, name, key, at)
    tokens = run.positive(sampling, "max_tokens") or limits.response
    run.set("tasks.NAME.max_tokens", tokens, at, "of all turns of a sample together")
    for name, key in (
        ("min_response_tokens", "tasks.NAME.sampling.min_tokens"),
        ("repetition_penalty", "tasks.NAME.sampling.repetition_penalty"),
    ):
        if name in model:
            run.put(model, name, key, run.number(model, name), at)
    if "ignore_eos" in engine:
        run.put(engine, "ignore_eos", "tasks.NAME.sampling.ignore_eos", run.flag(engine, "ignore_eos"), at)


def _choice_of_tokens(run: Conversion, given: Given, name: str, key: str, at: Place) -> None:
    value = run.whole(given, name) if name == "top_k" else run.number(given, name)
    if name == "temperature" and value == 0 and at[0] == "tasks":
        run.leave(given, name, "all samples of a group would be the same")
    elif value is not None:
        run.put(given, name, key, max(value, 0) if name == "top_k" else value, at)


def _columns(run: Conversion, form: Given, at: Place, limits: Limits) -> None:
    run.copy(form, at)
    run.set("tasks.NAME.rows.chat", True, at)
    run.set("tasks.NAME.rows.max_prompt_tokens", limits.prompt, at, "longer prompts are left out; Trinity cuts them")


def _thinking(run: Conversion, sources: tuple[Given, ...], at: Place) -> None:
    for given in sources:
        if "enable_thinking" in given and (thinks := run.flag(given, "enable_thinking")) is not None:
            run.put(given, "enable_thinking", "tasks.NAME.rows.template_options", {"enable_thinking": thinks}, at)
            return


def _workflow(run: Conversion, owner: Given, given: Given, form: Given, at: Place) -> None:
    """The agent loop and the judge."""
    common = "default_workflow_type"
    if at[0] == "evaluations" and owner.fields.get("default_eval_workflow_type"):
        common = "default_eval_workflow_type"
    name = _own_or_common(run, given, "default_workflow_type", owner.fields.get(common))
    if name is not None and name not in ONE_TURN:
        _custom_loop(run, form, name, at)
    if name in OWN_PROMPT and "system_prompt" not in form:
        run.written.note((*at, "prompts"), f"{name} has a system prompt in its code: set rows.system_prompt")
    _judge(run, owner, given, name, at)


def _custom_loop(run: Conversion, form: Given, workflow: str, at: Place) -> None:
    loop = dotted(workflow.rpartition(".")[2].removesuffix("_workflow"), "loops")
    note = f"{workflow} in Trinity: write this loop, or an environment: docs/guide/agents.md"
    run.set("tasks.NAME.agent_loop", loop, at, note)
    if run.written.values.pop((*at, "rows", "tools_field"), None) is not None:
        run.leave(form, "tools_key", f"{loop} gives the model its tools; rows have tools for one turn only")


def _own_or_common(run: Conversion, given: Given, name: str, common: Any) -> str | None:
    """The text of a taskset's setting, or else of the setting for all tasksets."""
    own = run.word(given, name)
    return a_text(common) if own is None else own


def _judge(run: Conversion, owner: Given, given: Given, workflow: Any, at: Place) -> None:
    name = _own_or_common(run, given, "default_reward_fn_type", owner.fields.get("default_reward_fn_type"))
    if name in JUDGES or (name is None and workflow in OWN_PROMPT):
        note = "Trinity's math_reward also rewards the format <think>...</think><answer>...</answer>"
        run.set("tasks.NAME.judge", "math", at, note if name in ("math_reward", None) else "")
        if name == "math_dapo_reward":
            _overlong(run, given, at)
        return
    if name is None:
        judge = "judges.reward"
        note = "the workflow gives the rewards in Trinity: write this function, or have the loop give them"
    else:
        judge = dotted(name.rpartition(".")[2], "judges")
        note = f"{name} in Trinity: write this function: docs/guide/judges.md"
    run.take(given, "reward_fn_args")
    run.leave(given, "reward_fn_args", f"they are the arguments of {judge}, which you write")
    run.set("tasks.NAME.judge", judge, at, note)


def _overlong(run: Conversion, given: Given, at: Place) -> None:
    """The soft penalty for long answers: half of Trinity's, since rewards are 1 and 0 here, and 1 and -1 there."""
    arguments = Arguments.of(run, given, "reward_fn_args")
    if not arguments.get("enable_overlong_penalty") or at[0] == "evaluations":
        return
    tokens, factor = arguments.number("cache_length"), arguments.number("penalty_factor")
    longest, end = arguments.number("max_response_length"), run.written.values[*at, "max_tokens"]
    arguments.rest()
    if tokens is not None and factor is not None:
        run.put(
            given,
            "reward_fn_args",
            "tasks.NAME.judging.overlong_buffer_tokens",
            min(int(tokens), int(end)),
            at,
            "" if longest in (None, end) else f"before max_tokens; in Trinity before {longest:g}",
        )
        half = "half of Trinity's, whose rewards are 1 and -1; divided by the deviation, advantages are the same"
        run.put(given, "reward_fn_args", "tasks.NAME.judging.overlong_penalty", factor / 2, at, half)


def _order(run: Conversion, selector: Given, at: Place) -> None:
    kind, columns = run.word(selector, "selector_type"), run.take(selector, "feature_keys")
    if kind in ORDERS:
        run.put(selector, "selector_type", "tasks.NAME.curriculum.prompt_order", ORDERS[kind], at)
        measured = "rollq measures how often a prompt is solved" if kind == "difficulty_based" else "it reads no column"
        run.leave(selector, "feature_keys", measured)
    elif kind == "offline_easy2hard" and isinstance(columns, list) and columns:
        run.put(
            selector,
            "feature_keys",
            "tasks.NAME.curriculum.prompt_order",
            {"by": str(columns[0]), "ascending": False},
            at,
            "the highest pass rate first",
        )
    elif "selector_type" in selector:
        run.leave(selector, "selector_type", "write a custom order: docs/guide/prompts.md")
