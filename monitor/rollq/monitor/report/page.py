"""The page of the report: a run in sentences, small tables and plots.

A pure function of the summary and the steps. The page is a single file that opens offline.
"""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from rollq.monitor.report.records import StepRecord
from rollq.monitor.status.prompt_rows import PromptRows

HARDLY = 0.1
"""A trainer that waits for at most this fraction of its time hardly waits."""
NOT_KEPT = "The rows do not add up: groups were lost or counted twice. This is a bug of rollq."
REASONS = {
    "archived": "trained; kept until the next checkpoint covers their step",
    "trained": "trained, and covered by a checkpoint",
    "in_buffer": "still in the buffer when the run ended",
    "filtered": "left out by a filter, mostly because all rewards were equal",
    "failed": "given up after several tries",
    "expired": "too old to be trained",
    "reused": "copies of trained groups that were not used again",
    "released": "given up by the trainer",
    "cancelled": "cancelled with their batch",
    "evaluated": "part of an evaluation",
}
FACTS = {"seed": "Seed", "mode": "Mode", "steps": "Train steps", "trained_tokens": "Trained tokens", "train_s": "Time"}
HANDLED = ("held_out", "staleness_shares", "samples_by_worker", "conservation", "prompts")

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 880px; margin: 2em auto; padding: 0 1em; color: #1b1b1b;
  background: #fff }}
h1 {{ font-size: 1.6em; margin-bottom: .2em }} h2 {{ font-size: 1.2em; margin-top: 2.2em }}
img {{ width: 100%; background: #fff; border: 1px solid #ddd }}
.note {{ color: #555 }} .bad {{ color: #b00020; font-weight: 600 }}
.wide {{ overflow-x: auto }}
table {{ border-collapse: collapse; margin: .8em 0 }}
td, th {{ padding: .2em 1.4em .2em 0; text-align: left; border-bottom: 1px solid #e5e5e5; vertical-align: top }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums }}
tr.sum td {{ font-weight: 600 }}
@media (prefers-color-scheme: dark) {{
  body {{ color: #e8e8e8; background: #16181b }} .note {{ color: #aaa }} .bad {{ color: #ff8a80 }}
  td, th {{ border-color: #33373c }} img {{ border-color: #33373c }}
}}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def render_page(title: str, summary: Mapping[str, Any], steps: Sequence[StepRecord], images: Mapping[str, str]) -> str:
    """The page, as HTML. `images` maps `reward`, `staleness` and `depth` to the plots' addresses."""
    sections = [
        _paragraph(lede(summary)),
        _section("Did the model learn?", _learned(summary), images["reward"], "Reward of the trained batches by step"),
        _section("How old were the trained tokens?", _ages(summary), images["staleness"], "Age of the trained tokens"),
        _section("Who waited for whom?", _waits(steps)),
        _section("Where did the groups go?", _groups(summary), images["depth"], "Groups in the buffer over time"),
        _section("Were all prompts used?", _prompts(summary)),
        _section("Which workers made the samples?", _workers(summary)),
        _section("About this run", _facts(summary)),
    ]
    return PAGE.format(title=html.escape(title), body="\n".join(section for section in sections if section))


def lede(summary: Mapping[str, Any]) -> str:
    """One or two sentences about the whole run."""
    steps, tokens = summary.get("steps", 0), summary.get("trained_tokens", 0)
    parts = [f"The trainer made {_plural(steps, 'step')} and trained {tokens:,} tokens"]
    if "train_s" in summary:
        parts.append(f" in {duration(summary['train_s'])}")
    parts.append(".")
    before, after = _means(summary)
    if before is not None and after is not None:
        parts.append(f" The reward for prompts that it never saw {_moved(before, after)}.")
    return "".join(parts)


def duration(seconds: float) -> str:
    """A duration, readable: 48 s, 2 min 05 s, 1 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _learned(summary: Mapping[str, Any]) -> str:
    before, after = (summary.get("held_out", {}).get(when, {}) for when in ("before", "after"))
    rows = [
        (("all tasks, mean" if task == "mean" else task), f"{before[task]:.3f}", f"{after[task]:.3f}",
         f"{after[task] - before[task]:+.3f}")
        for task in before if task in after
    ]  # fmt: skip
    if not rows:
        return _note("The line is the mean reward of the trained batches. It should rise.")
    table = _table(("Held-out reward", "before", "after", "change"), rows)
    return table + _note(
        "Held-out prompts were never trained, so a rise is learning and not memory. The demo's judges give 0 for a "
        "wrong answer and 1 for a right one. In the plot, dots are the held-out reward, and lines the reward of the "
        "trained batches."
    )


def _ages(summary: Mapping[str, Any]) -> str:
    shares = summary.get("staleness_shares", {})
    rows = [(f"{age}" + (" (the newest)" if int(age) == 0 else ""), f"{share:.1%}") for age, share in shares.items()]
    return _table(("Steps behind the newest weights", "trained tokens"), rows) + _note(
        "A token's age (staleness) counts the train steps between the weights that sampled it and the newest weights. "
        "If all are 0, generation and training took turns; with generation one step ahead, the age is 1. No token may "
        "be "
        "older than max_staleness allows, even after faults in the run."
    )


def _waits(steps: Sequence[StepRecord]) -> str:
    waited, trained = sum(step.wait_s for step in steps), sum(step.train_s for step in steps)
    if not steps or waited + trained == 0:
        return ""
    rows = [
        ("waited for its batch", f"{waited / len(steps):.2f} s", f"{waited / (waited + trained):.0%}"),
        ("trained it", f"{trained / len(steps):.2f} s", f"{trained / (waited + trained):.0%}"),
    ]
    waits = waited / (waited + trained)
    if waits <= HARDLY:
        verdict = "The trainer hardly waited: the workers kept up, and fewer might be enough."
    else:
        verdict = f"More or faster workers would shorten the training by at most {waits:.0%}, the time it waited."
    return _table(("In each step, the trainer", "mean time", "share"), rows) + _note(verdict)


def _groups(summary: Mapping[str, Any]) -> str:
    conservation = summary.get("conservation")
    if not conservation:
        return ""
    counts = {"archived": conservation["archived"], "in_buffer": conservation["in_buffer"], **conservation["dropped"]}
    order = [*REASONS, *(counts.keys() - REASONS.keys())]
    rows = [(REASONS.get(name, name), f"{counts[name]:,}") for name in order if counts.get(name)]
    table = _table(("Groups that were admitted", ""), [*rows, ("all", f"{conservation['admitted']:,}")], has_sum=True)
    if not conservation["holds"]:
        return table + f'<p class="bad">{html.escape(NOT_KEPT)}</p>'
    return table + _note(
        "A group is one prompt with all its samples. Every admitted group is accounted for: none was lost, and none "
        "was counted twice. The plot shows waiting and running groups. A steady height is good; many completed "
        "groups mean that the trainer is the bottleneck."
    )


def _prompts(summary: Mapping[str, Any]) -> str:
    rows = [
        (task, *(f"{rows[name]:,}" for name in PromptRows._fields)) for task, rows in summary.get("prompts", {}).items()
    ]
    return _table(("Task", "rows", "read", "used", "unusable", "too long"), rows) + (
        _note("Rows that cannot be read as prompts, or are longer than max_prompt_tokens, are left out.")
        if rows
        else ""
    )


def _workers(summary: Mapping[str, Any]) -> str:
    samples = summary.get("samples_by_worker", {})
    total = sum(samples.values())
    if not total:
        return ""
    rows = [(name, f"{n:,}", f"{n / total:.0%}") for name, n in samples.items()]
    return _table(("Worker", "trained samples", "share"), rows) + _note(
        "Workers that died and their replacements have separate rows. Equal workers should have about equal shares."
    )


def _facts(summary: Mapping[str, Any]) -> str:
    shown = {**summary, **({"train_s": duration(summary["train_s"])} if "train_s" in summary else {})}
    names = [*(name for name in FACTS if name in shown), *(name for name in shown if name not in {*FACTS, *HANDLED})]
    return _table(("", ""), [(FACTS.get(name, name), _text(shown[name])) for name in names], numbers=False)


def _means(summary: Mapping[str, Any]) -> tuple[float | None, float | None]:
    held_out = summary.get("held_out", {})
    return held_out.get("before", {}).get("mean"), held_out.get("after", {}).get("mean")


def _moved(before: float, after: float) -> str:
    if abs(after - before) < 0.005:
        return f"stayed at {after:.2f}"
    return f"{'rose' if after > before else 'fell'} from {before:.2f} to {after:.2f}"


def _plural(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "s")


def _text(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _section(heading: str, content: str, image: str | None = None, caption: str = "") -> str:
    if not content and not image:
        return ""
    plot = f'<img alt="{html.escape(caption)}" src="{image}">' if image else ""
    return f"<h2>{html.escape(heading)}</h2>\n{content}\n{plot}"


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _note(text: str) -> str:
    return f'<p class="note">{html.escape(text)}</p>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True, has_sum: bool = False) -> str:
    """A table whose first column is text and whose other columns are `numbers`. With `has_sum`, the last row is their
    sum."""
    if not rows:
        return ""

    def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
        classes = ["", *[' class="n"' if numbers else "" for _ in cells[1:]]]
        inside = "".join(f"<{tag}{c}>{html.escape(cell)}</{tag}>" for c, cell in zip(classes, cells, strict=True))
        return f"<tr{kind}>{inside}</tr>"

    head = line(heads, "th") if any(heads) else ""
    last = len(rows) - 1 if has_sum else -1
    body = "".join(line(row, "td", ' class="sum"' if index == last else "") for index, row in enumerate(rows))
    return f'<div class="wide"><table>{head}{body}</table></div>'
