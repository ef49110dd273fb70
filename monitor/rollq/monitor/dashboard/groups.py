"""Groups as JSON for the page: rows of a list, and one group with a bounded part of its tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rollq.buffer.archive.annotations import Annotations
from rollq.buffer.calls.group_details import FoundGroup
from rollq.monitor.dashboard.token_text import Decode, pieces
from rollq.monitor.dashboard.trainer_values import Trained, values_of
from rollq.monitor.groups.view import GroupView, SampleView, SegmentView, prompt_turns

FIRST_TOKENS = 600
"""Tokens of each sample that come with its group."""
MOST_TOKENS = 4_000
"""Tokens of a sample in one answer."""
PROMPT_CHARACTERS = 200
ERROR_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """How tokens become text. `decode`: None where ids are shown; `note` says why, or whose tokenizer it is."""

    decode: Decode | None
    note: str


def row_of(group: FoundGroup) -> dict[str, Any]:
    """A row of the list. `at_ms`: when it was put last, or else admitted."""
    stored, turns = group.fields, prompt_turns(group.prompt) if group.prompt.content else ()
    return {
        "task": group.task,
        "group": group.group_id,
        "status": group.status.value,
        "step": group.batch.step if group.batch else _number(stored.get("step")),
        "reward": float(stored["reward"]) if stored.get("reward") and "c" in stored.get("letters", "") else None,
        "tokens": _number(stored.get("tokens")),
        "tries": _number(stored.get("tries")),
        "worker": group.leases[-1].worker if group.leases else stored.get("worker", ""),
        "at_ms": _number(stored.get("put_ms") or stored.get("admitted_ms")),
        "error": stored.get("error", "")[:ERROR_CHARACTERS],
        "prompt": turns[-1].text[:PROMPT_CHARACTERS] if turns else "",
    }


def group_of(view: GroupView, trained: Trained, texts: TokenTexts) -> dict[str, Any]:
    """A whole group, with the first `FIRST_TOKENS` tokens of each sample."""
    plain = _shallow(view)
    plain["samples"] = [_sample(sample, trained.annotations, texts) for sample in view.samples]
    return {**plain, "texts": texts.note, "annotations": trained.note}


def tokens_of(
    sample: SampleView, start: int, count: int, annotations: Annotations, texts: TokenTexts
) -> list[dict[str, Any]]:
    """Tokens from `start` on, counted over all segments: for each segment that has some, columns of equal length.

    `annotations` are further columns by name: what the trainer has written about the tokens.
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


def _number(text: str | None) -> int | None:
    return int(text) if text else None


def chosen(values: str, known: Sequence[str], what: str) -> list[str]:
    """The comma-separated `values`, in the order of `known`; all for "". Raises `ValueError` for an unknown one."""
    wanted = [value for value in values.split(",") if value]
    if unknown := [value for value in wanted if value not in known]:
        raise ValueError(f"{what} {unknown[0]!r}: there are {', '.join(known)}")
    return [value for value in known if value in wanted] if wanted else list(known)
