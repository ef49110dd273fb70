"""The live view of a run in a terminal: made from records and snapshots alone, fits 80 x 24.

`LiveView` is a plain value, `render` a pure function of it; whoever watches the run feeds it to `rich.live.Live`, or
prints `plain_line` where there is no terminal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollq.buffer.rollouts import Status
from rollq.monitor.records import BufferReading, StepRecord

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
    """What is shown: the run so far. `notes` are the latest events, newest last; times in seconds."""

    title: str
    total_steps: int
    elapsed_s: float
    limit_s: float | None = None
    steps: Sequence[StepRecord] = ()
    snapshot: BufferReading = field(default_factory=lambda: BufferReading(time_s=0.0))
    notes: Sequence[str] = ()


def render(view: LiveView) -> RenderableType:
    """The whole view, at most 24 lines of 80 columns."""
    tables = Table.grid(padding=(0, 3, 0, 0))
    tables.add_row(_depth_table(view.snapshot), _worker_table(view.snapshot))
    notes = (Text(note, style="yellow", overflow="ellipsis", no_wrap=True) for note in view.notes[-SHOWN_NOTES:])
    trainer = Text(_trainer_line(view.steps[-RECENT_STEPS:]))
    return Group(_headline(view), _progress(view), _reward_table(view.steps), trainer, Text(), tables, *notes)


def plain_line(view: LiveView) -> str:
    """The same in one line, for logs."""
    step = view.steps[-1].step if view.steps else 0
    depths = {status.value: sum(d.get(status.value, 0) for d in view.snapshot.depths.values()) for status in Status}
    shares = staleness_shares(view.steps[-RECENT_STEPS:])
    parts = [
        f"{clock(view.elapsed_s)} step {step}/{view.total_steps}",
        f"reward {mean_reward(view.steps[-RECENT_STEPS:]):.3f}" if view.steps else "waiting for the first batch",
        " ".join(f"s{age} {share:.0%}" for age, share in shares.items()),
        f"{tokens_per_s(view.steps[-RECENT_STEPS:]):,.0f} tokens/s",
        " ".join(f"{name} {n}" for name, n in depths.items() if n),
        " ".join(f"{name}@v{report.get('version', '?')}" for name, report in sorted(view.snapshot.workers.items())),
    ]
    return " | ".join(part for part in parts if part)


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` averaged into at most `width` blocks, scaled between their smallest and largest mean."""
    if not values:
        return ""
    size = -(-len(values) // width)
    means = [sum(chunk) / len(chunk) for chunk in (values[i : i + size] for i in range(0, len(values), size))]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def mean_reward(steps: Sequence[StepRecord], task: str | None = None) -> float:
    """Mean reward of steps, of one task or of all; 0 without any."""
    rewards = [s.reward if task is None else s.rewards[task] for s in steps if task is None or task in s.rewards]
    return sum(rewards) / len(rewards) if rewards else 0.0


def staleness_shares(steps: Sequence[StepRecord]) -> dict[int, float]:
    """Share of trained tokens by staleness, smallest staleness first."""
    totals: dict[int, int] = {}
    for step in steps:
        for age, tokens in step.staleness_tokens.items():
            totals[age] = totals.get(age, 0) + tokens
    everything = sum(totals.values())
    return {age: totals[age] / everything for age in sorted(totals)} if everything else {}


def tokens_per_s(steps: Sequence[StepRecord]) -> float:
    """Trained tokens per second between the first and the last of `steps`; 0 with less than two."""
    if len(steps) < 2 or steps[-1].time_s <= steps[0].time_s:
        return 0.0
    return sum(step.tokens for step in steps[1:]) / (steps[-1].time_s - steps[0].time_s)


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def remaining_s(view: LiveView) -> float | None:
    """Seconds until the last step at the recent pace, at most until the time limit; None before there is a pace."""
    recent = view.steps[-RECENT_STEPS:]
    if len(recent) < 2:
        return None
    pace_s = (recent[-1].time_s - recent[0].time_s) / (recent[-1].step - recent[0].step)
    left_s = max(0.0, (view.total_steps - recent[-1].step) * pace_s)
    return left_s if view.limit_s is None else min(left_s, max(0.0, view.limit_s - view.elapsed_s))


def _headline(view: LiveView) -> Text:
    step = view.steps[-1].step if view.steps else 0
    left_s = remaining_s(view)
    return Text.assemble(
        (view.title, "bold"),
        f"   step {step}/{view.total_steps}   live weights v{view.snapshot.version}   {clock(view.elapsed_s)} elapsed",
        f", {clock(left_s)} left" if left_s is not None else "",
    )


def _progress(view: LiveView) -> Text:
    done = BAR_WIDTH * (view.steps[-1].step if view.steps else 0) // view.total_steps
    return Text.assemble(("━" * done, "green"), ("─" * (BAR_WIDTH - done), "dim"))


def _reward_table(steps: Sequence[StepRecord]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    if not steps:
        table.add_row("waiting for the first batch")
        return table
    recent = steps[-RECENT_STEPS:]
    tasks = sorted({task for step in recent for task in step.rewards})
    rows: list[tuple[str, float, list[float]]] = [("reward", mean_reward(recent), [step.reward for step in steps])]
    for task in tasks if 1 < len(tasks) <= SHOWN_TASKS else []:
        rewards = [step.rewards[task] for step in steps if task in step.rewards]
        rows.append((f"  {task[:12]}", mean_reward(recent, task), rewards))
    for name, mean, rewards in rows:
        table.add_row(
            Text(name), Text(f"{mean:.3f}", style="bold green"), Text(sparkline(rewards, SPARKLINE_WIDTH), "green")
        )
    return table


def _depth_table(snapshot: BufferReading) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    tasks = sorted(snapshot.depths)
    shown = {task[:10]: [task] for task in tasks} if len(tasks) <= SHOWN_TASKS else {"all tasks": tasks}
    table.add_column("groups")
    for name in shown:
        table.add_column(name, justify="right")
    for status in Status:
        sums = (sum(snapshot.depths[task].get(status.value, 0) for task in members) for members in shown.values())
        table.add_row(status.value, *(f"{groups:,}" for groups in sums))
    return table


def _worker_table(snapshot: BufferReading) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    for header in ("worker", "version", "in flight", "groups"):
        table.add_column(header, justify="left" if header == "worker" else "right")
    for name, report in islice(sorted(snapshot.workers.items()), SHOWN_WORKERS):
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
