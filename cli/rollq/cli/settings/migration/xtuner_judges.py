"""Converts XTuner's judgers to judges of a task or an evaluation."""

from typing import Any, Final

from rollq.cli.settings.migration.conversion import Conversion, Given
from rollq.cli.settings.migration.names import dotted
from rollq.cli.settings.migration.readings import a_number
from rollq.cli.settings.migration.table import system
from rollq.cli.settings.migration.values import REST, Made, Named, Unknown, shown

Place = tuple[str, ...]
Judge = dict[str, Any]
"""`judge`, and `options` if it has any, in the form of a table of judges."""

GSM8K: Final = r"#### (-?[0-9.,]+)"
THOUGHT: Final = r"(?s)^<think>.*</think>.*\\boxed\{.*\}"


def convert_judge(run: Conversion, task: Given, at: Place) -> None:
    """The judge of a task or an evaluation."""
    config = task.fields.get("judger_config")
    if not isinstance(config, Made):
        note = f"{_missing(run, task, config)}; write this function: docs/guide/judges.md"
        run.set("tasks.NAME.judge", "judges.reward", at, note)
        return
    if config.group == "ComposedJudgerConfig":
        _composed(run, task, config, at)
        return
    judge, note = _judge(run, config, at)
    run.set("tasks.NAME.judge", judge["judge"], at, note)
    if "options" in judge:
        run.set("tasks.NAME.judge_options", judge["options"], at)


def _missing(run: Conversion, task: Given, config: Any) -> str:
    """Why a task has no known judger."""
    if config is not None or REST in task:
        run.to_replace += 1
        return f"replace: {shown(config or task.fields[REST])}, known only when the XTuner file runs"
    loop = task.fields.get("agent_loop_config")
    if isinstance(loop, Made) and loop.group == "SingleTurnAgentLoopConfig":
        return "replace: none in XTuner"
    return "none in XTuner: its agent loop gives the rewards"


def _composed(run: Conversion, task: Given, config: Made, at: Place) -> None:
    """A judge for each value of `data_source`, or several judges whose rewards are added."""
    given = Given("ComposedJudgerConfig", config.fields, "ComposedJudgerConfig.")
    if judges := _branches(run, run.take(given, "branches"), at):
        sources = _mapping(task) or {name: {name: 1.0} for name in judges}
        table = {source: _several(judges, weights) for source, weights in sources.items()}
        run.put(
            given, "branches", "tasks.NAME.judge", {"field": "data_source"} | {k: v for k, v in table.items() if v}, at
        )
    else:
        run.set("tasks.NAME.judge", "judges.reward", at, "its branches are known only when the XTuner file runs")
    run.rest(given)


def _branches(run: Conversion, branches: Any, at: Place) -> dict[str, Judge]:
    """The judges of readable branches. Comments list the others."""
    judges: dict[str, Judge] = {}
    for name, branch in branches.items() if isinstance(branches, dict) else ():
        if not isinstance(branch, Made):
            run.to_replace += 1
            run.written.comment(
                f"ComposedJudgerConfig.branches[{str(name)!r}] = {shown(branch)}",
                "known only when the file runs; add its judge to the task's table of judges",
            )
            continue
        judges[str(name)], note = _judge(run, branch, at)
        if note:
            run.written.note((*at, "judge"), f"{name}: {note}")
    return judges


def _mapping(task: Given) -> dict[str, dict[str, float]]:
    """Data source -> branch -> weight, if the rows' tokenizer has such a mapping."""
    value: Any = task.fields
    for step in ("sampler_config", "dataloader_cfg", "dataset_config_list", 0, "tokenize_fn", "data_judger_mapping"):
        value = _below(value, step)
    if not isinstance(value, dict):
        return {}
    return {str(source): weights for source, weights in value.items() if isinstance(weights, dict)}


def _below(value: Any, step: Any) -> Any:
    """A value's field or item, None if it has no such part."""
    value = value.fields if isinstance(value, Made) else value
    if isinstance(value, list) and step == 0:
        return next(iter(value), None)
    return value.get(step) if isinstance(value, dict) else None


def _several(judges: dict[str, Judge], weights: dict[str, float]) -> Any:
    """The judges of a data source, in the form of a table of judges."""
    found = [
        judges[name] | ({} if weight == 1 else {"weight": weight}) for name, weight in weights.items() if name in judges
    ]
    if len(found) != 1:
        return found
    return found[0]["judge"] if found[0].keys() == {"judge"} else found[0]


def _judge(run: Conversion, config: Made, at: Place) -> tuple[Judge, str]:
    """A judge, and a note on its difference from XTuner's."""
    known = config.group in system("xtuner").groups
    given = Given(config.group if known else "JudgerConfig", config.fields, f"{config.group}.")
    given.taken |= {"judger_name", "reward_handler"}
    run.converted += len(given.taken & config.fields.keys())
    extra = given.fields.get("extra_info")
    match "" if config.fields.get("reward_handler") is not None else config.group:
        case "GSM8KJudgerConfig":
            judge, note = (
                {"judge": "regex", "options": {"pattern": GSM8K}},
                "XTuner looks at the last 300 characters only",
            )
        case "GEO3KJudgerConfig":
            judge, note = _geometry(run, given)
            extra = _rewards_of_right(extra)
        case "DapoMathJudgerConfig":
            judge, note = {"judge": "math"}, 'XTuner compares normalized texts after "Answer:", and rewards 1 and -1'
            _overlong(run, given, at)
        case _:
            judge, note = _custom(config)
    differs = _scores(extra)
    run.rest(given)
    return judge, "; ".join(filter(None, (note, differs)))


def _scores(extra: Any) -> str:
    """A note on how the rewards of a judger differ from 1 for a right answer and 0 for a wrong answer."""
    given = {} if extra is None else extra
    if not isinstance(given, dict):
        return f"XTuner's extra_info is {shown(extra)}: the rewards may differ"
    if given.keys() <= _SCORES.keys():
        given = {name: value for name, value in given.items() if a_number(value) != _SCORES[name]}
    texts = ", ".join(f"{name} = {shown(value)}" for name, value in given.items())
    return f"the rewards differ: {texts} in XTuner" if texts else ""


_SCORES: Final = {"score": 1, "format_score": 0}
"""The rewards for a right answer, and for an answer that only has the right form, without `extra_info`."""


def _geometry(run: Conversion, given: Given) -> tuple[Judge, str]:
    extra = run.take(given, "extra_info")
    weight = extra.get("format_score") if isinstance(extra, dict) else 0.1
    weight = 0.1 if (known := a_number(weight)) is None else known
    form = {"judge": "regex", "weight": weight, "options": {"pattern": THOUGHT, "compare": False}}
    parts = {"right": {"judge": "math", "weight": 1 - weight}, "format": form}
    return {"judge": "weighted", "options": {"parts": parts}}, "XTuner grades with mathruler, rollq with math-verify"


def _rewards_of_right(extra: Any) -> Any:
    """The rewards, without the reward that `_geometry` takes over."""
    is_read = isinstance(extra, dict)
    return {name: value for name, value in extra.items() if name != "format_score"} if is_read else extra


def _overlong(run: Conversion, given: Given, at: Place) -> None:
    """The soft penalty for long answers: half of XTuner's, since rewards are 1 and 0 here, and 1 and -1 there."""
    is_used = run.flag(given, "enable_overlong_buffer")
    tokens, factor = run.whole(given, "overlong_buffer_len"), run.number(given, "overlong_penalty_factor")
    if at[0] == "evaluations" or not is_used or tokens is None:
        return
    note = ""
    longest = run.written.values.get((*at, "max_tokens"))
    if isinstance(longest, int) and tokens > longest:
        note, tokens = f"{tokens} in XTuner, more than max_tokens", longest
    elif (limit := given.fields.get("max_response_len")) not in (None, longest):
        note = f"counted back from max_tokens; in XTuner from {limit!r}"
    run.put(given, "overlong_buffer_len", "tasks.NAME.judging.overlong_buffer_tokens", tokens, at, note)
    if factor is not None:
        half = "half of XTuner's, whose rewards are 1 and -1; divided by the deviation, advantages are the same"
        run.put(given, "overlong_penalty_factor", "tasks.NAME.judging.overlong_penalty", factor / 2, at, half)


def _custom(config: Made) -> tuple[Judge, str]:
    """A judge for the user to write, or a server."""
    handler = config.fields.get("reward_handler")
    if isinstance(handler, str) and handler.startswith(("http://", "https://")):
        note = "the server gets prompt, answer, metadata and text, and answers with a reward: docs/guide/judges.md"
        return {"judge": "http", "options": {"url": handler}}, note
    name = handler.name if isinstance(handler, Named) else handler.text if isinstance(handler, Unknown) else ""
    path = dotted(name.rpartition(".")[2] or config.group.removesuffix("JudgerConfig").lower(), "judges")
    return {"judge": path}, "write this function of prompt and sample: docs/guide/judges.md"
