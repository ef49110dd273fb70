"""The summary of a finished run, as plain values computed from its records."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollq.buffer.calls.replies.tasks import dropped_groups, unaccounted_groups
from rollq.buffer.values.rollouts import Status
from rollq.monitor.report.live_view import staleness_shares
from rollq.monitor.report.records import BufferReading, StepRecord
from rollq.monitor.status.prompt_rows import PromptRows


def conservation(reading: BufferReading) -> dict[str, Any]:
    """Where all tasks' admitted groups are: archived, elsewhere in the buffer, or dropped for a counted reason
    (`trained` once a checkpoint covers them). `holds` says whether every group is accounted for."""
    dropped: Counter[str] = Counter()
    for counters in reading.progress.values():
        dropped.update(dropped_groups(counters))
    archived = sum(statuses.get(Status.ARCHIVED.value, 0) for statuses in reading.depths.values())
    return {
        "admitted": sum(int(counters.get("admitted", 0)) for counters in reading.progress.values()),
        "archived": archived,
        "in_buffer": sum(sum(statuses.values()) for statuses in reading.depths.values()) - archived,
        "dropped": dict(dropped),
        "holds": not any(
            unaccounted_groups(reading.progress[task], reading.depths.get(task, {})) for task in reading.progress
        ),
    }


def prompt_rows(reading: BufferReading) -> dict[str, dict[str, int]]:
    """Each task's and evaluation's numbers of prompt rows: all, read, used, unusable and too long."""
    counted = {task: PromptRows.counted(counters) for task, counters in reading.progress.items()}
    return {task: rows._asdict() for task, rows in counted.items() if rows is not None}


def samples_by_worker(steps: Iterable[StepRecord]) -> dict[str, int]:
    """Count the trained samples of each worker, including workers that have died."""
    samples: Counter[str] = Counter()
    for step in steps:
        samples.update(step.workers)
    return dict(sorted(samples.items()))


def summarize(
    steps: Sequence[StepRecord],
    snapshots: Sequence[BufferReading],
    *,
    held_out: Mapping[str, Mapping[str, float]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Return plain values for `summary.json`.

    `held_out` maps `before` and `after` to each task's mean held-out reward. `facts` come first.
    """
    return {
        **facts,
        "steps": steps[-1].step if steps else 0,
        "trained_tokens": sum(step.tokens for step in steps),
        "held_out": _with_means(held_out),
        "staleness_shares": {str(age): share for age, share in staleness_shares(steps).items()},
        "samples_by_worker": samples_by_worker(steps),
        "conservation": conservation(snapshots[-1]) if snapshots else {},
        "prompts": prompt_rows(snapshots[-1]) if snapshots else {},
    }


def _with_means(held_out: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {when: {**rewards, "mean": _mean(rewards)} for when, rewards in held_out.items() if rewards}


def summary_lines(summary: Mapping[str, Any]) -> list[str]:
    """Format the summary for a terminal."""
    lines = [f"{summary['steps']} steps, {summary['trained_tokens']:,} tokens trained in {summary['train_s']:.0f} s"]
    before, after = (summary["held_out"].get(when, {}) for when in ("before", "after"))
    for task in before:
        gain = after[task] - before[task]
        lines.append(f"held-out reward, {task}: {before[task]:.3f} -> {after[task]:.3f} ({gain:+.3f})")
    shares = ", ".join(f"{share:.1%} are {age}" for age, share in summary["staleness_shares"].items())
    lines.append(f"steps from the weights of a trained token to the newest (staleness): {shares}")
    workers = ", ".join(f"{name}: {samples:,}" for name, samples in summary["samples_by_worker"].items())
    lines.append(f"trained samples by worker: {workers}")
    if conservation := summary["conservation"]:
        lines.append(_accounts(conservation))
    return lines


def _accounts(conservation: Mapping[str, Any]) -> str:
    """Whether all admitted groups are accounted for."""
    admitted = f"{conservation['admitted']:,}"
    trained = conservation["archived"] + conservation["dropped"].get("trained", 0)
    others = [f", {n:,} {reason}" for reason, n in conservation["dropped"].items() if reason != "trained"]
    parts = f"{trained:,} trained, {conservation['in_buffer']:,} still in the buffer{''.join(others)}"
    if conservation["holds"]:
        return f"groups: all {admitted} that were admitted are accounted for: {parts}"
    return f"groups: {admitted} WERE ADMITTED, BUT THESE DO NOT ADD UP: {parts}"


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)
