"""The status of a run as lines of text, and as JSON. Pure."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import orjson

from rollq.buffer.calls.evaluations import EvaluationState
from rollq.buffer.calls.replies.trainer import LiveModel
from rollq.buffer.values.memory_use import Fullness
from rollq.buffer.values.places import Place
from rollq.buffer.values.rollouts import AUDITED, NOT_AUDITED, Status
from rollq.buffer.values.trainer_state import TrainerState
from rollq.monitor.status.diagnosis import diagnose
from rollq.monitor.status.lost_workers import gpus_in_words
from rollq.monitor.status.prompt_rows import PromptRows, described, reasons
from rollq.monitor.status.read import RunStatus, TaskStatus, groups_in
from rollq.monitor.status.trainer_words import is_silent, last_work, shortened
from rollq.monitor.status.wanted_workers import wanted_workers, workers_in_words
from rollq.monitor.text.tables import aligned, fitting
from rollq.monitor.text.units import count, in_words, of_limit, seconds_in_words

STATUS_VERSION = 2
"""Version of the JSON that `as_json` returns, which grows when a field is removed or changes its meaning."""
WIDTH = 100
"""Characters per line if the terminal reports no width."""
ALWAYS_SHOWN = (Status.PENDING, Status.RUNNING, Status.COMPLETED)
WORKER_COLUMNS = {
    "host": "process",
    "gpus": "GPU",
    "engine": "engine",
    "version": "version",
    "state": "state",
    "samples_in_flight": "samples",
    "in_flight": "groups",
    "tokens_per_s": "tokens/s",
    "batch_share": "of batch",
    "generate_s": "generate",
    "judge_s": "judge",
    "groups": "done groups",
    "failed_samples": "failed samples",
    "age_s": "age",
}
"""The fields of a worker's report that the table shows, with their titles; JSON has all fields."""
SPARE_COLUMNS = ("gpus", "engine", "age_s", "groups", "failed_samples", "judge_s", "generate_s", "in_flight", "version")
"""Fields that a narrow terminal omits first."""
_CELLS: Mapping[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "host": lambda value, report: f"{value}:{report.get('pid', '?')}",
    "samples_in_flight": lambda value, report: f"{value}/{report.get('capacity', '?')}",
    "batch_share": lambda value, _: f"{value:.0%}",
    **dict.fromkeys(("generate_s", "judge_s", "age_s"), lambda value, _: seconds_in_words(value)),
}
"""Columns whose cells are not just the value, each with a function that makes a cell from the value and the report."""
MOST_PRODUCERS = 3
"""How many producers are named."""
FULLNESS_FIELDS = ("share", "limit", "is_full", "used_bytes", "limit_bytes")
QUIET_TRAINER_S = 2.0
"""A trainer that is silent for longer than this is shown with its last activity."""
MISMATCH_FIELDS = ("mean", "p99", "max", "kl", "effective_sample_size")
"""The fields of the trainer's mismatch that are shown; JSON also has them by task, worker and version."""


def as_json(run: RunStatus) -> str:
    """Return one JSON object: the fields of `RunStatus`, the version of the format as `schema`, the diagnosis, and
    `wanted_workers`."""
    return orjson.dumps(_plain(run), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode()


def as_json_line(run: RunStatus) -> str:
    """Return the same object on one line."""
    return orjson.dumps(_plain(run), option=orjson.OPT_NON_STR_KEYS).decode()


def _plain(run: RunStatus) -> Mapping[str, Any]:
    diagnosis = diagnose(run)
    return {
        "schema": STATUS_VERSION,
        "diagnosis": {**asdict(diagnosis), "level": diagnosis.level},
        "wanted_workers": wanted_workers(run),
        **asdict(run),
        "tasks": [{**asdict(task), "state": task.state} for task in run.tasks],
        "fullness": {name: getattr(run.fullness, name) for name in FULLNESS_FIELDS},
    }


def as_table(run: RunStatus, width: int = WIDTH) -> str:
    """Return the diagnosis, the remedies, and tables of tasks and workers; at most `width` characters wide if names are
    short."""
    diagnosis = diagnose(run)
    lines = _all_wrapped([str(diagnosis), *diagnosis.to_do], width)
    lines += ["", *_wrapped(run_line(run), width), *trainer_lines(run.trainer, width)]
    lines += _wrapped(producers_line(run.tasks), width)
    if tasks := run.task_list:
        lines += ["", *_depth_table(tasks), "", *_rate_table(tasks), "", *_age_table(tasks)]
    if evaluations := evaluation_table(run.tasks):
        lines += ["", *evaluations]
    lines += ["", *(_worker_lines(run.workers, width) or ["no worker has reported lately"])]
    lines += _all_wrapped(_refusals(run.workers), width)
    details = _all_wrapped(chain.from_iterable(_task_lines(task, run.fullness) for task in run.tasks), width)
    return "\n".join([*lines, *([""] if details else []), *details])


def run_line(run: RunStatus) -> str:
    """The run's live weights, tickets and RQ's jobs, memory and number of workers."""
    full = run.fullness
    jobs = ", ".join(f"{number} {registry}" for registry, number in run.jobs.items() if number)
    facts = [
        count(run.tickets, "ticket") + (f" ({jobs} by RQ)" if jobs else ""),
        f"{full.share:.0%} of {full.limit}{of_limit(full.used_bytes, full.limit_bytes)}" if full.share else "",
        workers_in_words(run),
    ]
    return f"run {run.run}: {_model(run.model)}; " + "; ".join(fact for fact in facts if fact)


def producers_line(tasks: Iterable[TaskStatus]) -> str:
    """The places of all producers that any task has seen, latest first; empty without producers."""
    seen: dict[Place, float] = {}
    for producer in chain.from_iterable(task.producers for task in tasks):
        seen[producer.place] = min(producer.silent_s, seen.get(producer.place, producer.silent_s))
    ordered = sorted(seen, key=lambda place: (seen[place], place.pid))
    shown = [f"on {place} (seen {seconds_in_words(seen[place])} ago)" for place in ordered[:MOST_PRODUCERS]]
    shown += [f"{more} more"] if (more := len(ordered) - len(shown)) else []
    return f"producer{'s' if len(ordered) > 1 else ''}: {', '.join(shown)}" if shown else ""


def _refusals(workers: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, report in workers.items():
        if why := report.get("refused_weights"):
            yield f"{name}: {why}"


def _model(model: LiveModel | None) -> str:
    return "no weights published yet" if model is None else f"version {model.version} (epoch {model.epoch})"


def _depth_table(tasks: Sequence[TaskStatus]) -> list[str]:
    statuses = [status for status in NOT_AUDITED if status in ALWAYS_SHOWN or groups_in(tasks, status)]
    header = ["task", "step", "reward", "length", "ready", "bound", *(status.value for status in statuses)]
    rows = [
        [
            task.task,
            str(task.step),
            reward_cell(task, tasks),
            length_cell(task),
            f"{task.ready}/{task.batch_groups}",
            task.bound,
            *(f"{task.groups(status)}" for status in statuses),
        ]
        for task in tasks
    ]
    return aligned([header, *rows])


def evaluation_table(tasks: Sequence[TaskStatus]) -> list[str]:
    """A row for each evaluation: the last result's weights and reward, and the present evaluation's progress."""
    rows = [[task.task, *_evaluation_cells(task.evaluation)] for task in tasks if task.is_evaluation]
    return aligned([["evaluation", "last step", "reward", "done", "failed", "state"], *rows]) if rows else []


def _evaluation_cells(state: EvaluationState | None) -> list[str]:
    if state is None:
        return ["-", "-", "-", "-", "not yet"]
    return [
        "-" if state.version is None else str(state.version),
        "-" if state.reward is None else f"{state.reward:.3f}",
        f"{state.finished:,}/{state.prompts:,}",
        f"{state.failed:,}",
        "running" if state.is_running else "over",
    ]


def reward_cell(task: TaskStatus, tasks: Sequence[TaskStatus]) -> str:
    """A task's mean reward in the last step; the lowest of several trained tasks' rewards is marked."""
    if task.reward is None:
        return "-"
    return f"{'lowest ' if _is_lowest(task, tasks) else ''}{task.reward:.3f}"


def _is_lowest(task: TaskStatus, tasks: Sequence[TaskStatus]) -> bool:
    rewards = {other.reward for other in tasks if other.reward is not None and not other.is_retired}
    return len(rewards) > 1 and not task.is_retired and task.reward == min(rewards)


def length_cell(task: TaskStatus) -> str:
    """The mean number of trained tokens per response in the last step."""
    return "-" if task.response_tokens is None else f"{task.response_tokens:,.0f}"


def _rate_table(tasks: Sequence[TaskStatus]) -> list[str]:
    header = ["last min", "groups/s", "tokens/s", "trained/s", "failed/s", "kept", "queued", "worked", "waited"]
    rows = [[task.task, *_rate_cells(task)] for task in tasks]
    return aligned([header, *rows])


def _rate_cells(task: TaskStatus) -> list[str]:
    kept_share = f"{task.kept / task.outcomes:.0%}" if task.outcomes else "-"
    if (rates_now := task.rates) is None:
        return ["-", "-", "-", "-", kept_share, "-", "-", "-"]
    rates = [
        f"{rates_now.groups:.2f}",
        f"{rates_now.tokens:,.0f}",
        f"{rates_now.trained:.2f}",
        f"{rates_now.failed:.2f}",
    ]
    return [
        *rates,
        kept_share,
        _seconds(rates_now.queued_s),
        _seconds(rates_now.worked_s),
        _seconds(rates_now.waited_s),
    ]


def _age_table(tasks: Sequence[TaskStatus]) -> list[str]:
    header = ["oldest", "pending", "running", "ready", "producer seen"]
    rows = [
        [
            task.task,
            _seconds(task.pending_age_s),
            _seconds(task.running_age_s),
            _seconds(task.ready_age_s),
            _producer_seen(task),
        ]
        for task in tasks
    ]
    return aligned([header, *rows])


def _producer_seen(task: TaskStatus) -> str:
    if task.offline:
        return "-"
    return "never" if task.producer_silent_s is None else f"{seconds_in_words(task.producer_silent_s)} ago"


def _shares(groups: Mapping[int, int]) -> str:
    return ", ".join(f"{staleness}: {number}" for staleness, number in groups.items())


def _dropped(groups: Mapping[str, int]) -> str:
    return ", ".join(f"{count(number, 'group')} {reason}" for reason, number in groups.items() if number)


def _task_lines(task: TaskStatus, fullness: Fullness) -> list[str]:
    """Optional facts about a task. In a full buffer, always includes the bytes of samples."""
    lines = [*_prompt_lines(task), *_group_lines(task)]
    if kept := [f"{task.groups(status):,} {status}" for status in AUDITED if task.groups(status)]:
        lines.append(f"kept for inspection: {', '.join(kept)}")
    if task.bytes or fullness.is_full:
        lines.append(_samples_line(task))
    return [f"{task.task}: {line}" for line in (*lines, *_state_lines(task))]


def _prompt_lines(task: TaskStatus) -> Iterator[str]:
    if task.offline:
        yield f"offline: {int(task.progress.get('inserted', 0)):,} groups were inserted so far"
    if (rows := PromptRows.counted(task.progress)) is not None:
        why = f" ({reasons(task.unusable)})" if task.unusable else ""
        yield f"prompts: {described(rows, task.excluded)}{why}"


def _group_lines(task: TaskStatus) -> Iterator[str]:
    if any(task.by_staleness.values()):
        yield f"staleness of ready groups: {_shares(task.by_staleness)}"
    if any(task.dropped.values()):
        yield f"so far: {_dropped(task.dropped)}"
    if task.failed_samples:
        yield f"failed samples: {', '.join(f'{n:,} {kind}' for kind, n in task.failed_samples.items())}"


def _state_lines(task: TaskStatus) -> Iterator[str]:
    """Orders that hold the task back, and its last error."""
    if task.is_retired:
        yield f"retired: no batch takes its groups; `rollq set {task.task} batch_groups=N` brings it back"
    if task.control != "run":
        yield f"set to {task.control!r}" + (f": {task.control_reason}" if task.control_reason else "")
    if task.last_error:
        yield f"last error ({seconds_in_words(task.last_error.age_s)} ago): {shortened(task.last_error.text)}"


def _samples_line(task: TaskStatus) -> str:
    """The bytes that samples take, by status."""
    parts = ", ".join(f"{status} {in_words(taken)}" for status, taken in task.bytes.items())
    archived = "; archived groups are trained, and stay until a checkpoint" if Status.ARCHIVED in task.bytes else ""
    return f"samples take {in_words(sum(task.bytes.values()))}" + (f" ({parts}{archived})" if parts else "")


def trainer_lines(trainer: TrainerState | None, width: int) -> list[str]:
    """The trainer's phase, its steps' times, its last step with the mismatch with the engines, and its error."""
    if trainer is None:
        return []
    facts = [_phase(trainer), *_where(trainer.place)]
    if trainer.busy_s is not None:
        waited = seconds_in_words(trainer.waited_s or 0)
        facts.append(f"a step takes {seconds_in_words(trainer.busy_s)} after a wait of {waited}")
    facts += _reported(trainer.report or {})
    name = "trainer" if trainer.trainer_id == "trainer" else f"trainer {trainer.trainer_id}"
    error = _wrapped(f"{name}'s error: {shortened(trainer.error)}", width) if trainer.error else []
    return [*_wrapped(f"{name}: " + "; ".join(facts), width), *error]


def _where(place: Place | None) -> list[str]:
    gpus = f", {gpus_in_words(place.gpus)}" if place and place.gpus else ""
    return [f"on {place}{gpus}"] if place else []


def _phase(trainer: TrainerState) -> str:
    """The trainer's activity and its duration."""
    if not trainer.has_ended and (trainer.silent_s > QUIET_TRAINER_S or is_silent(trainer)):
        return f"last heard {seconds_in_words(trainer.silent_s)} ago, then {last_work(trainer)}"
    lasting = seconds_in_words(trainer.for_s)
    since = f", {lasting} ago" if trainer.has_ended else f" for {lasting}"
    return f"{trainer.phase or 'no word yet'}, step {trainer.step}{since}"


def _reported(report: Mapping[str, Any]) -> list[str]:
    """Facts about the last step reported by a trainer."""
    facts = []
    if report:
        what = f"trained step {report['step']}" if "step" in report else "reported"
        facts.append(f"{what} {seconds_in_words(report['age_s'])} ago")
    if isinstance(reward := report.get("reward"), float):
        facts.append(f"reward {reward:.3f}")
    if isinstance(inserted := report.get("inserted_samples"), int):
        facts.append(f"{count(inserted, 'sample')} of it inserted")
    if isinstance(mismatch := report.get("mismatch"), Mapping):
        facts += _mismatch(mismatch)
    return facts


def _mismatch(mismatch: Mapping[str, Any]) -> list[str]:
    shown = ", ".join(f"{name} {_short(mismatch[name])}" for name in MISMATCH_FIELDS if name in mismatch)
    return [f"mismatch with the engines: {shown}"] if shown else []


def _worker_lines(workers: Mapping[str, Mapping[str, Any]], width: int) -> list[str]:
    """A row for each worker, workers in trouble first."""
    ordered = sorted(workers.items(), key=lambda item: (item[1]["condition"] == "alive", item[0]))
    columns = worker_columns(workers, width)
    rows = [[name, *(worker_cell(column, report) for column in columns)] for name, report in ordered]
    return aligned([["worker", *(WORKER_COLUMNS[column] for column in columns)], *rows]) if rows else []


def worker_columns(workers: Mapping[str, Mapping[str, Any]], width: int) -> list[str]:
    """The columns of the workers' table that fit into a width; optional columns are omitted first."""
    widths = {}
    for column, title in WORKER_COLUMNS.items():
        if any(report.get(column, "") != "" for report in workers.values()):
            cells = [title, *(worker_cell(column, report) for report in workers.values())]
            widths[column] = 2 + max(map(len, cells))
    return fitting(widths, SPARE_COLUMNS, width - max(map(len, ["worker", *workers])))


def worker_cell(column: str, report: Mapping[str, Any]) -> str:
    """A field of a worker's report as text."""
    value = report.get(column)
    if column == "state" and report["condition"] != "alive":
        return str(report["condition"]).upper()
    if value is None:
        return "-"
    if column in _CELLS:
        return _CELLS[column](value, report)
    text = f"{value:,.0f}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


def _seconds(value: float | None) -> str:
    return "-" if value is None else seconds_in_words(value)


def _short(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, int | float) else "-"


def _wrapped(text: str, width: int) -> list[str]:
    indent = "     " if text.startswith(" ") else "  "  # below the words of a numbered step
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _all_wrapped(texts: Iterable[str], width: int) -> list[str]:
    return [line for text in texts for line in _wrapped(text, width)]
