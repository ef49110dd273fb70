"""The result of a query, as a table or as JSON lines."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rollq.buffer.query.conditions import Condition, wanted_samples
from rollq.buffer.query.ranking import Sort
from rollq.buffer.query.records import GroupRecord
from rollq.buffer.wire.sample_outcomes import SampleOutcome
from rollq.monitor.text.tables import aligned
from rollq.monitor.text.terminal import cut, one_line

WIDTH = 100
"""Width of a row in characters; longer rows are cut."""
SAMPLES_SHOWN = 3
"""The most samples of a group in a row of the table."""

_HEADER = ("task", "uid", "status", "step", "staleness", "reward", "tokens", "tries", "samples", "error")
_TEXT_COLUMNS = (0, 2, 8, 9)
_MAY_BE_LEFT_OUT = (9, 8)


class Answer(NamedTuple):
    """A group that matches a query. `samples` are the matching samples in order, None if the query has no conditions on
    samples."""

    group: GroupRecord
    samples: Sequence[SampleOutcome] | None = None


def answers_of(records: Iterable[GroupRecord], condition: Condition, sort: Sort | None) -> list[Answer]:
    """The groups, with the samples that match a condition, in the order of `sort`."""
    answers = []
    for record in records:
        samples = wanted_samples(condition, record.samples)
        if samples is not None and sort is not None:
            samples.sort(key=sort.sample_place)
        answers.append(Answer(record, samples))
    return answers


def as_lines(answers: Sequence[Answer]) -> list[str]:
    """One JSON object per group, in ASCII: an error may quote a model's text."""
    return [json.dumps(_plain(answer), separators=(",", ":")) for answer in answers]


def _plain(answer: Answer) -> dict[str, object]:
    group = answer.group
    return {
        "uid": group.uid,
        "task": group.task,
        "status": group.status,
        "step": group.step,
        "staleness": group.staleness,
        "arrival": group.arrival,
        "reward": group.reward,
        "min_reward": group.min_reward,
        "max_reward": group.max_reward,
        "tokens": group.tokens,
        "finish_reason": sorted(group.finish_reason),
        "failure": sorted(group.failure),
        "tries": group.tries,
        "error": group.error,
        "samples": [asdict(sample) for sample in (group.samples if answer.samples is None else answer.samples)],
    }


def as_table(answers: Sequence[Answer], *, more: bool) -> str:
    """One row per group, with its error at the end. `more` adds a line about further groups."""
    if not answers:
        return "no groups"
    rows = [_HEADER, *map(_cells, answers)]
    for column in _MAY_BE_LEFT_OUT:
        if not any(row[column] for row in rows[1:]):
            rows = [(*row[:column], *row[column + 1 :]) for row in rows]
    lines = [cut(line, WIDTH) for line in aligned(rows, left=_TEXT_COLUMNS)]
    return "\n".join(lines + ["and more: see --limit and --count"] * more)


def _cells(answer: Answer) -> tuple[str, ...]:
    group = answer.group
    reward = "-" if group.reward is None else f"{group.reward:.3f}"
    step, tokens = ("-" if number is None else str(number) for number in (group.step, group.tokens))
    shown = ", ".join(map(_sample, (answer.samples or ())[:SAMPLES_SHOWN]))
    rest = len(answer.samples or ()) - SAMPLES_SHOWN
    samples = f"{shown} and {rest} more" if rest > 0 else shown
    numbers = (step, str(group.staleness), reward, tokens, str(group.tries))
    return group.task, str(group.uid), group.status, *numbers, samples, one_line(group.error)


def _sample(sample: SampleOutcome) -> str:
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:.3g}"
    return f"{sample.index}: {reward}, {sample.tokens} tokens"
