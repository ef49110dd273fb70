"""The report of a finished run: three plots, a page that explains them, and all numbers as JSON.

Files: `reward.png`, `staleness.png`, `depth.png`, `index.html`, `report.json`. The plots are drawn with matplotlib
(extra `demo`) without a display, and embedded in the page, which can therefore be viewed offline.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import AUDITED, Status
from rollq.monitor.report.page import render_page
from rollq.monitor.report.records import BufferReading, StepRecord, rewarded_tasks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f", "#000000",
    "#f0e442", "#8da0cb",
)  # fmt: skip
STEP_FIELDS = ("step", "time_s", "tokens", "wait_s", "train_s")
"""The fields of a step that `report.json` lists."""
SMOOTHING_STEPS = 20
SMOOTHING_READINGS = 5
WORKING_STATUSES = tuple(status.value for status in Status if status not in (*AUDITED, Status.ARCHIVED))
"""The statuses in the plot. Permanent statuses would hide the others."""


def write_report(
    folder: Path, title: str, summary: Mapping[str, Any], steps: Sequence[StepRecord], readings: Sequence[BufferReading]
) -> Path:
    """Write the report into `folder`, which is created if needed, and return the path of its page.

    `summary` has the plain values that `summarize` returns. `summary["held_out"]`, if present, maps `before` and
    `after` to each task's reward, and is drawn into the reward plot. Raises `ConfigError` without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "reward": reward_figure(steps, summary.get("held_out") or {}),
        "staleness": staleness_figure(steps),
        "depth": depth_figure(readings),
    }
    images = {}
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        images[name] = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
    (folder / "report.json").write_bytes(
        orjson.dumps(report_data(summary, steps, readings), option=orjson.OPT_INDENT_2)
    )
    page = folder / "index.html"
    page.write_text(render_page(title, summary, steps, images), encoding="utf-8")
    return page


def report_data(
    summary: Mapping[str, Any], steps: Sequence[StepRecord], readings: Sequence[BufferReading]
) -> dict[str, Any]:
    """Return all numbers of the page as plain values; curves are columns of equal length."""
    numbers = [step.step for step in steps]
    return {
        "summary": dict(summary),
        "reward": {
            "step": numbers,
            "mean": [step.reward for step in steps],
            "tasks": {task: _reward_curve(steps, task) for task in rewarded_tasks(steps)},
        },
        "staleness": {"step": numbers, "tokens": {str(age): _token_curve(steps, age) for age in _ages(steps)}},
        "depth": {
            "time_s": [reading.time_s for reading in readings],
            "tasks": {task: _depth_curves(readings, task) for task in _buffer_tasks(readings)},
        },
        "steps": list(map(_step_row, steps)),
    }


def _reward_curve(steps: Sequence[StepRecord], task: str) -> list[float | None]:
    return [step.rewards.get(task) for step in steps]


def _token_curve(steps: Sequence[StepRecord], age: int) -> list[int]:
    return [step.staleness_tokens.get(age, 0) for step in steps]


def _step_row(step: StepRecord) -> dict[str, Any]:
    return {name: getattr(step, name) for name in STEP_FIELDS}


def reward_figure(steps: Sequence[StepRecord], held_out: Mapping[str, Mapping[str, float]]) -> "Figure":
    """Plot the reward per step and task (pale), its running mean (bold), and the held-out rewards (dots)."""
    figure = _figure()
    axes = figure.subplots()
    last = steps[-1].step if steps else 1
    for colour, task in zip(COLOURS, rewarded_tasks(steps), strict=False):
        rewards = {step.step: step.rewards[task] for step in steps if task in step.rewards}
        means = running_mean(list(rewards.values()), SMOOTHING_STEPS)
        axes.plot(list(rewards), list(rewards.values()), color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(list(rewards), means, color=colour, linewidth=2, label=task)
        _plot_held_out(axes, task, held_out, last, colour)
    axes.set(xlabel="train step", ylabel=f"mean reward (line: mean of {SMOOTHING_STEPS} steps)", ylim=(-0.02, 1.02))
    _finish(axes)
    return figure


def _plot_held_out(
    axes: Any, task: str, held_out: Mapping[str, Mapping[str, float]], last_step: int, colour: str
) -> None:
    """Draw the held-out reward of a task before the first and after the last step, if known."""
    ends = {0: held_out.get("before", {}).get(task), last_step: held_out.get("after", {}).get(task)}
    measured = {step: reward for step, reward in ends.items() if reward is not None}
    if measured:
        label = f"{task}, held-out"
        axes.plot(list(measured), list(measured.values()), "o", color=colour, markeredgecolor="black", label=label)


def staleness_figure(steps: Sequence[StepRecord]) -> "Figure":
    """Plot the share of trained tokens by staleness over the steps, stacked."""
    figure = _figure()
    axes = figure.subplots()
    ages = _ages(steps)
    if ages:
        shares = [running_mean([_share(step, age) for step in steps], SMOOTHING_STEPS) for age in ages]
        labels = ["newest weights" if age == 0 else f"{age} behind" for age in ages]
        axes.stackplot([s.step for s in steps], shares, labels=labels, colors=COLOURS[: len(ages)], alpha=0.8)
    axes.set(xlabel="train step", ylabel=f"share of trained tokens (mean of {SMOOTHING_STEPS} steps)", ylim=(0, 1))
    _finish(axes)
    return figure


def depth_figure(readings: Sequence[BufferReading]) -> "Figure":
    """Plot the groups per status over time, stacked, one panel per task, without groups that are archived or kept for
    audit."""
    tasks = _buffer_tasks(readings) or ["no task"]
    figure = _figure(height_in=1.2 + 2.8 * len(tasks))
    panels = figure.subplots(len(tasks), sharex=True, squeeze=False)[:, 0]
    for axes, task in zip(panels, tasks, strict=True):
        _plot_depth(axes, readings, task)
    panels[-1].set_xlabel("seconds since the start")
    return figure


def _plot_depth(axes: Any, readings: Sequence[BufferReading], task: str) -> None:
    times = [reading.time_s - readings[0].time_s for reading in readings]
    curves = {status: values for status, values in _depth_curves(readings, task).items() if any(values)}
    shown = {s: running_mean(curves[s], SMOOTHING_READINGS) for s in WORKING_STATUSES if s in curves}
    if shown:
        colours = dict(zip(WORKING_STATUSES, COLOURS, strict=False))
        axes.stackplot(times, *shown.values(), labels=list(shown), colors=list(map(colours.get, shown)), alpha=0.8)
    axes.set(ylabel=f"{task}: groups (mean of {SMOOTHING_READINGS} readings)")
    axes.set_ylim(bottom=0)
    _finish(axes)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """For each value, its mean with up to `window - 1` preceding values."""
    means, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - window] if i >= window else 0.0)
        means.append(total / min(i + 1, window))
    return means


def _figure(height_in: float = 4.5) -> "Figure":
    try:
        from matplotlib.figure import Figure  # not pyplot: no display, no global state
    except ImportError as error:
        raise ConfigError("the plots of the report need matplotlib: pip install 'rollq[demo]'") from error
    return Figure(figsize=(9.0, height_in), layout="constrained")


def _finish(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _ages(steps: Sequence[StepRecord]) -> list[int]:
    return sorted({age for step in steps for age in step.staleness_tokens})


def _share(step: StepRecord, age: int) -> float:
    return step.staleness_tokens.get(age, 0) / max(1, sum(step.staleness_tokens.values()))


def _buffer_tasks(readings: Sequence[BufferReading]) -> list[str]:
    return sorted({task for reading in readings for task in reading.depths})


def _depth_curves(readings: Sequence[BufferReading], task: str) -> dict[str, list[int]]:
    """A task's groups in each reading, by status."""
    depths = [reading.depths.get(task, {}) for reading in readings]
    return {status.value: [counts.get(status.value, 0) for counts in depths] for status in Status}
