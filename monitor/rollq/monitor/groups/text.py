"""Groups as readable text, and as JSON for programs. All text from models is escaped for the terminal."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from rollq.buffer.calls.group_details import FoundGroup
from rollq.monitor.groups.view import CallView, GroupView, SampleView, Tools, Turn, prompt_turns
from rollq.monitor.text.tables import aligned
from rollq.monitor.text.terminal import cut, escaped, one_line, wrapped

TEXT_LINES = 12
"""How many lines of a text are shown by default."""
INDENT = "  "


def as_json(view: GroupView) -> str:
    """One JSON object in ASCII, in one line."""
    return json.dumps(asdict(view), default=str)


def as_text(view: GroupView, *, width: int = 100, full: bool = False) -> str:
    """A group's life, and its samples. Texts are cut to a few lines unless `full`; `width` is in columns."""
    most = None if full else TEXT_LINES
    lines = [_title(view), "", *_life(view, width), "", "prompt", *_prompt(view, width, most)]
    lines += [*_tools(view.tools, width), *_about(view, width, most)]
    for sample in view.samples:
        lines += ["", *_sample(sample, width, most)]
    if not full and any(line.endswith(MORE) for line in lines):
        lines += ["", "texts are cut: --full shows all of them"]
    return "\n".join(lines)


def _about(view: GroupView, width: int, most: int | None) -> Iterator[str]:
    """The images, the answer and the errors of a group."""
    if view.images:
        yield f"{INDENT}with {view.images} image{'s' * (view.images > 1)}"
    if view.answer is not None:
        yield f"answer  {cut(one_line(str(view.answer)), width - 8)}"
    if view.error:
        yield from ("", "error", *_block(view.error, width, most))
    if view.problem:
        yield from ("", f"samples are not shown: {one_line(view.problem)}")


MORE = "more lines"
MOST_DEPTH = 12
"""How far the calls of an agent are indented."""


def _title(view: GroupView) -> str:
    reward = "" if view.reward is None else f", reward {view.reward:.3f}"
    return f"group {view.group_id} of {view.task}: {view.status}{reward}"


def _life(view: GroupView, width: int) -> list[str]:
    times_ms = [event.at_ms for event in view.events if event.at_ms is not None]
    start = times_ms[0] if times_ms else view.now_ms
    began = datetime.fromtimestamp(start / 1000, UTC)
    rows = [
        (INDENT + ("now" if event.at_ms is None else _since(event.at_ms - start)), one_line(event.text))
        for event in view.events
    ]
    first = f"{began:%Y-%m-%d %H:%M:%S} UTC, {_ago(view.now_ms - start)} ago"
    return [first, *(cut(line, width) for line in aligned(rows, left=(1,)))]


def _prompt(view: GroupView, width: int, most: int | None) -> Iterator[str]:
    if len(view.prompt) == 1:
        return _block(view.prompt[0].text, width, most, mark="| ")
    return _turns(view.prompt, width, most)


def _tools(tools: Tools, width: int) -> Iterator[str]:
    if tools.names:
        yield from _block(f"with tools: {', '.join(map(one_line, tools.names))}", width, None)


def _since(ms: int) -> str:
    return f"+{ms / 1000:.1f} s" if abs(ms) < 600_000 else f"+{ms / 60_000:.0f} min"


def _ago(ms: int) -> str:
    return f"{ms / 1000:.0f} s" if ms < 600_000 else f"{ms / 60_000:.0f} min"


def _judging(sample: SampleView) -> Iterator[str]:
    if sample.reward_parts:
        parts = ", ".join(f"{one_line(name)} {value:.3f}" for name, value in sample.reward_parts.items())
        yield f"reward parts: {parts}"
    if sample.judge:
        seconds = "" if sample.judge_s is None else f" in {sample.judge_s:.2f} s"
        yield f"made by {one_line(sample.worker)}, judged by {one_line(sample.judge)}{seconds}"


def _sample(sample: SampleView, width: int, most: int | None) -> Iterator[str]:
    yield cut(f"sample {sample.index}: {', '.join(_facts(sample))}", width)
    if sample.tokens:
        yield cut(INDENT + _tokens(sample), width)
    for line in _judging(sample):
        yield cut(f"{INDENT}{line}", width)
    if sample.error:
        yield from _block(f"error: {sample.error}", width, most)
    yield from _tools(sample.tools, width)
    yield from _calls(sample.calls, width, most)
    if sample.turns:
        yield from _turns(sample.turns, width, most)
    elif sample.text:
        yield from _block(sample.text, width, most, mark="| ")


def _calls(calls: Sequence[CallView], width: int, most: int | None) -> Iterator[str]:
    for call in calls[:most]:
        where = "not trained" if call.segment is None else f"segment {call.segment}"
        reason = f", {one_line(call.left_out)}" if call.left_out else ""
        after = "" if call.parent is None else f" after {call.parent}"
        text = f"call {call.number}{after}: {call.tokens} tokens, {where}{reason}"
        yield cut(INDENT * (1 + min(call.depth, MOST_DEPTH)) + text, width)
    if most is not None and len(calls) > most:
        yield f"{INDENT}... and {len(calls) - most} more calls; --full shows all"


def _facts(sample: SampleView) -> Iterator[str]:
    yield f"{sample.status} ({sample.failure})" if sample.failure else sample.status
    if sample.reward is not None:
        yield f"reward {sample.reward:.3f}"
    if sample.advantage is not None:
        yield f"advantage {sample.advantage:.3f}"
    if sample.finish_reason:
        yield f"ended by {sample.finish_reason}"


def _tokens(sample: SampleView) -> str:
    versions = ", ".join(f"{count} of version {version}" for version, count in sample.tokens_by_version.items())
    segments = f" in {len(sample.segments)} segments" if len(sample.segments) > 1 else ""
    return f"{sample.tokens} tokens{segments}: {versions or 'of no version'}; the loss counts {sample.counted_tokens}"


def _turns(turns: Sequence[Turn], width: int, most: int | None) -> Iterator[str]:
    for turn in turns:
        name = f" {turn.name}" if turn.name else ""
        yield cut(INDENT + one_line(turn.role + name) + ":", width)
        yield from _block(turn.text, width, most, mark="| ")


def _block(text: str, width: int, most: int | None, mark: str = "") -> Iterator[str]:
    lines = list(wrapped(escaped(text), max(20, width - len(INDENT) - len(mark))))
    for line in lines[:most]:
        yield (INDENT + mark + line).rstrip()
    if most is not None and len(lines) > most:
        yield f"{INDENT}... and {len(lines) - most} {MORE}"


def as_list(groups: Sequence[FoundGroup], *, width: int = 100) -> str:
    """A row for each group."""
    header = ("group", "task", "status", "reward", "tokens", "tries", "worker", "prompt")
    rows = [header, *map(_row, groups)]
    return "\n".join(cut(line, width) for line in aligned(rows, left=(1, 2, 6, 7)))


def _row(group: FoundGroup) -> tuple[str, ...]:
    fields = group.fields
    reward = f"{float(fields['reward']):.3f}" if "reward" in fields else "-"
    worker = group.leases[-1].worker if group.leases else fields.get("worker", "-")
    prompt = one_line(prompt_turns(group.prompt)[-1].text) if group.prompt.content else ""
    # fmt: off
    return (
        str(group.group_id), group.task, group.status.value, reward, fields.get("tokens", "-"),
        fields.get("tries", "-"), one_line(worker), cut(prompt, 60),
    )
    # fmt: on
