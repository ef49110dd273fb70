"""Groups as JSON for the page: rows of a list, and one group with a bounded part of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rollq.buffer.archive.annotations import Annotations
from rollq.buffer.calls.group_details import FoundGroup
from rollq.buffer.query.conditions import OneSample
from rollq.buffer.wire.sample_outcomes import SampleOutcome, longest, rewards_of
from rollq.monitor.dashboard.token_text import Decode, pieces
from rollq.monitor.dashboard.trainer_values import Trained, values_of
from rollq.monitor.groups.view import GroupView, SampleView, SegmentView, prompt_turns

FIRST_TOKENS = 600
"""How many tokens of each sample are sent with its group."""
MOST_TOKENS = 4_000
"""The most tokens of a sample in one answer."""
MOST_SAMPLES = 64
"""The most samples of a group in a row of the list."""
PROMPT_CHARACTERS = 200
ERROR_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """Converts tokens to text. `decode` is None if ids are shown. `note` gives the reason for this, or the tokenizer's
    source."""

    decode: Decode | None
    note: str


def row_of(group: FoundGroup, sample: OneSample | None = None) -> dict[str, Any]:
    """A row of the list. `at_ms` is the time of the group's last put, otherwise of its admission. `samples` has, for
    each of at most `MOST_SAMPLES` started samples, its index, reward, response tokens, finish reason, whether it is
    finished and judged, and whether it matches the conditions. If there are more samples, matching samples are kept
    first."""
    stored, turns = group.fields, prompt_turns(group.prompt) if group.prompt.content else ()
    outcomes = group.outcomes
    rewards = rewards_of(outcomes)
    return {
        "task": group.task,
        "group": group.group_id,
        "status": group.status.value,
        "archived": group.is_archived,
        "step": group.listed_step,
        "reward": group.reward,
        "min_reward": min(rewards, default=None),
        "max_reward": max(rewards, default=None),
        "tokens": longest(outcomes),
        "samples": _outcome_rows(outcomes, sample),
        "tries": group.tries,
        "worker": group.leases[-1].worker if group.leases else stored.get("worker", ""),
        "at_ms": group.at_ms,
        "error": stored.get("error", "")[:ERROR_CHARACTERS],
        "prompt": turns[-1].text[:PROMPT_CHARACTERS] if turns else "",
    }


def _outcome_rows(outcomes: Sequence[SampleOutcome], sample: OneSample | None) -> list[list[Any]]:
    rows = [
        [
            outcome.index,
            outcome.reward,
            outcome.tokens,
            outcome.finish_reason,
            outcome.is_valid,
            sample is None or sample.accepts(outcome),
        ]
        for outcome in outcomes
    ]
    return sorted(sorted(rows, key=lambda row: not row[-1])[:MOST_SAMPLES])


def group_of(view: GroupView, trained: Trained, texts: TokenTexts) -> dict[str, Any]:
    """A whole group, with the first `FIRST_TOKENS` tokens of each sample."""
    plain = _shallow(view)
    plain["samples"] = [_sample(sample, trained.annotations, texts) for sample in view.samples]
    return {**plain, "texts": texts.note, "annotations": trained.note}


def tokens_of(
    sample: SampleView, start: int, count: int, annotations: Annotations, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Tokens from `start` on, counted over all segments: columns of equal length for each segment in the range.

    `annotations` holds further columns by name: the trainer's values for the tokens.
    """
    parts, before, end = list[dict[str, Any]](), 0, start + min(count, MOST_TOKENS)
    for number, segment in enumerate(sample.segments):
        low, high = max(start - before, 0), min(end - before, len(segment.ids))
        if low < high:
            values = values_of(segment, annotations.get((sample.index, number)))
            columns = {name: column[low:high] for name, column in values.items()}
            part = {"segment": number, "start": before + low, **_columns(segment, low, high, texts)}
            parts.append({**part, "annotations": columns})
        before += len(segment.ids)
    return parts


def _columns(segment: SegmentView, low: int, high: int, texts: TokenTexts) -> dict[str, Any]:
    return {
        "prompt_tokens": len(segment.prompt_ids),
        "ids": segment.ids[low:high],
        "pieces": None if texts.decode is None else pieces(texts.decode, segment.ids, low, high),
        "versions": None if segment.versions is None else segment.versions[low:high],
        "counts": segment.counts[low:high],
        "logprobs": segment.logprobs[low:high],
    }


def _sample(sample: SampleView, annotations: Annotations, texts: TokenTexts) -> Mapping[str, Any]:
    plain = _shallow(sample)
    if sample.advantage is None and (first := annotations.get((sample.index, 0))):
        plain["advantage"] = first.advantage
    plain["segments"] = len(sample.segments)
    plain["parts"] = tokens_of(sample, 0, FIRST_TOKENS, annotations, texts)
    return plain


def _shallow(value: GroupView | SampleView) -> dict[str, Any]:
    return {attribute.name: getattr(value, attribute.name) for attribute in fields(value)}
