"""The live view of a run in a terminal of 80 x 24 characters, made only from records and buffer readings.

`LiveView` is a plain value, and `render` is a pure function of a view. Pass the result to `rich.live.Live`, or print
`plain_line` if there is no terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollq.buffer.values.rollouts import AUDITED, NOT_AUDITED, Status
from rollq.monitor.report.records import BufferReading, StepRecord, rewarded_tasks

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT_STEPS = 20
SPARKLINE_WIDTH = 46
BAR_WIDTH = 78
SHOWN_NOTES = 3
SHOWN_TASKS = 2
SHOWN_WORKERS = 4
SILENT_S = 5.0  # workers report each second


@dataclass(frozen=True, slots=True)
class LiveView:
    """The content of the view. `total_steps` is 0 if no trainer's steps are known. `notes` are the latest events,
    newest last; times are in seconds."""

    title: str
    total_steps: int
    elapsed_s: float
    steps: Sequence[StepRecord] = ()
    reading: BufferReading = field(default_factory=lambda: BufferReading(time_s=0.0))

    @property
    def step(self) -> int:
        """The last trained step; 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    @property
    def progress(self) -> str:
        """The last trained step and the total, as in "step 3/150"; empty if no trainer's steps are known."""
        return f"step {self.step}/{self.total_steps}" if self.total_steps else ""

    @property
    def recent(self) -> Sequence[StepRecord]:
        """The last `RECENT_STEPS` steps."""
        return self.steps[-RECENT_STEPS:]

    notes: Sequence[str] = ()


def render(view: LiveView) -> RenderableType:
    """Render the whole view in at most 24 lines of 80 characters."""
    tables = Table.grid(padding=(0, 3, 0, 0))
    tables.add_row(_depth_table(view.reading), _worker_table(view.reading))
    notes = (Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in view.notes[-SHOWN_NOTES:])
    trainer = Text(_trainer_line(view.recent))
    return Group(_headline(view), _progress(view), _reward_table(view), trainer, Text(), tables, *notes)


def plain_line(view: LiveView) -> str:
    """Render the view as one line, for logs."""
    workers, depths = sorted(view.reading.workers.items()), _total_depths(view.reading)
    parts = [
        f"{clock(view.elapsed_s)} {view.progress}".rstrip(),
        _reward(view),
        " ".join(f"s{age} {share:.0%}" for age, share in staleness_shares(view.recent).items()),
        f"{tokens_per_s(view.recent):,.0f} tokens/s",
        " ".join(f"{status} {depths[status]}" for status in NOT_AUDITED if depths[status]),
        f"{kept} kept for inspection" if (kept := _kept(depths)) else "",
        " ".join(f"{name}@v{report.get('version', '?')}" for name, report in workers),
    ]
    return " | ".join(filter(None, parts))


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values`, averaged into at most `width` blocks, scaled between the smallest and the largest mean."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(chunk) / len(chunk) for chunk in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def mean_reward(steps: Sequence[StepRecord], task: str | None = None) -> float:
    """Mean reward of steps, for one task or for all; 0 without steps."""
    rewards = [s.reward if task is None else s.rewards[task] for s in steps if task is None or task in s.rewards]
    return sum(rewards) / len(rewards) if rewards else 0.0


def staleness_shares(steps: Sequence[StepRecord]) -> dict[int, float]:
    """Share of trained tokens per staleness, in ascending order."""
    totals: dict[int, int] = {}
    for step in steps:
        for age, tokens in step.staleness_tokens.items():
            totals[age] = totals.get(age, 0) + tokens
    everything = sum(totals.values())
    return {age: totals[age] / everything for age in sorted(totals)} if everything else {}


def tokens_per_s(steps: Sequence[StepRecord]) -> float:
    """Trained tokens per second between the first and the last of `steps`; 0 for fewer than two."""
    if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
        return 0.0
    return sum(step.tokens for step in steps[1:]) / (steps[-1].time_s - steps[0].time_s)


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds, `m:ss`."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def remaining_s(view: LiveView) -> float | None:
    """Seconds until the last step at the recent pace; None before the second step."""
    recent = view.recent
    if len(recent) < 2:
        return None
    pace_s = (recent[-1].time_s - recent[0].time_s) / (recent[-1].step - recent[0].step)
    return max(0.0, (view.total_steps - recent[-1].step) * pace_s)


def _headline(view: LiveView) -> Text:
    left_s = remaining_s(view)
    version, elapsed = view.reading.version, clock(view.elapsed_s)
    return Text.assemble(
        (view.title, "bold"),
        f"   {view.progress}   live weights v{version}   {elapsed} elapsed",
        f", {clock(left_s)} left" if left_s is not None else "",
    )


def _progress(view: LiveView) -> Text:
    done = BAR_WIDTH * view.step // max(1, view.total_steps)
    return Text.assemble(("━" * done, "green"), ("─" * (BAR_WIDTH - done), "dim"))


def _reward_table(view: LiveView) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    if not view.steps:
        table.add_row("waiting for the first batch")
        return table
    _add_reward(table, "reward", mean_reward(view.recent), [step.reward for step in view.steps])
    tasks = rewarded_tasks(view.recent)
    for task in tasks if 1 < len(tasks) <= SHOWN_TASKS else []:
        rewards = [step.rewards[task] for step in view.steps if task in step.rewards]
        _add_reward(table, f"  {task[:12]}", mean_reward(view.recent, task), rewards)
    return table


def _add_reward(table: Table, name: str, mean: float, rewards: Sequence[float]) -> None:
    table.add_row(
        Text(name), Text(f"{mean:.3f}", style="bold green"), Text(sparkline(rewards, SPARKLINE_WIDTH), "green")
    )


def _depth_table(reading: BufferReading) -> Table:
    """Groups per status: a column per task if there are few, otherwise the sums of all tasks."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    columns = _depth_columns(reading)
    table.add_column("groups")
    for name in columns:
        table.add_column(name, justify="right")
    for status in NOT_AUDITED:
        groups = [depths.get(status.value, 0) for depths in columns.values()]
        if status is not Status.LEAVING or any(groups):  # without an archive, no group is leaving
            table.add_row(status.value, *map("{:,}".format, groups))
    table.add_row("kept for inspection", *(f"{_kept(depths):,}" for depths in columns.values()), style="dim")
    return table


def _depth_columns(reading: BufferReading) -> dict[str, Mapping[str, int]]:
    if len(reading.depths) > SHOWN_TASKS:
        return {"all tasks": _total_depths(reading)}
    return {task[:10]: reading.depths[task] for task in sorted(reading.depths)}


def _reward(view: LiveView) -> str:
    if view.steps:
        return f"reward {mean_reward(view.recent):.3f}"
    return "waiting for the first batch" if view.total_steps else ""


def _kept(depths: Mapping[str, int]) -> int:
    return sum(depths.get(status.value, 0) for status in AUDITED)


def _total_depths(reading: BufferReading) -> dict[str, int]:
    """Groups per status, summed over all tasks."""
    return {status.value: sum(d.get(status.value, 0) for d in reading.depths.values()) for status in Status}


def _worker_table(reading: BufferReading) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for header in ("worker", "version", "in flight", "groups"):
        table.add_column(header, justify="left" if header == "worker" else "right")
    for name, report in islice(sorted(reading.workers.items()), SHOWN_WORKERS):
        silent = float(report.get("age_s", 0.0)) > SILENT_S
        in_flight = "silent" if silent else _number(report, "in_flight")
        table.add_row(name[:14], f"v{report.get('version', '?')}", in_flight, _number(report, "groups"))
    return table


def _trainer_line(recent: Sequence[StepRecord]) -> str:
    shares = "  ".join(f"{age}: {share:.0%}" for age, share in staleness_shares(recent).items()) or "-"
    wait_s = sum(step.wait_s for step in recent) / max(1, len(recent))
    train_s = sum(step.train_s for step in recent) / max(1, len(recent))
    times = f"waits {wait_s * 1e3:,.0f} ms, trains {train_s * 1e3:,.0f} ms a step"
    return f"staleness {shares}   {tokens_per_s(recent):,.0f} tokens/s   {times}"


def _number(report: Mapping[str, Any], key: str) -> str:
    return f"{report[key]:,}" if key in report else "-"
