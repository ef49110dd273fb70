"""One group for display: its life as a list of events, and its samples down to single tokens.

`view_of` turns the buffer's data into a `GroupView`, a plain value. Text, JSON and pages are made from this view
without the buffer. Pure.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rollq.buffer.calls.group_details import FoundGroup, PastLease
from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import NO_VERSION, Prompt, Sample, SampleStatus, Segment, Status

Pieces = Callable[[Sequence[int]], Sequence[str]]
"""Token ids -> the text of each."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a group's life, at `at_ms` (ms since 1970, by the server's clock); None for its current state."""

    at_ms: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation, as text. `name` is a tool's."""

    role: str
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools offered to the model: their names, and their definitions in OpenAI's form."""

    names: tuple[str, ...]
    definitions: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class SegmentView:
    """One segment, token by token: all fields except `prompt_ids` have an entry for each response token. `pieces` holds
    each token's text, and is None without a tokenizer. `versions` is None for an inserted sample. An entry of
    `logprobs` is None if absent. `counts` says whether the loss may count the token.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    pieces: tuple[str, ...] | None
    versions: tuple[int, ...] | None
    counts: tuple[bool, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class CallView:
    """One call of an agent over the gateway. `parent` is the number of the call that it continues. `depth` counts the
    branches on the path from the first call: calls whose parent another call had already continued. `segment` holds its
    tokens, or is None if they are not trained, with the reason in `left_out`."""

    number: int
    parent: int | None
    depth: int
    tokens: int
    segment: int | None
    left_out: str


@dataclass(frozen=True, slots=True)
class SampleView:
    """One sample. `reward` and `advantage` come from a pipeline, if there was one. `failure` names the part that
    failed. `counted_tokens` counts the response tokens that the loss may count. `turns` are an agent's messages after
    the prompt. `calls` are an agent's calls over the gateway, each after the call that it continues. `tools` is empty
    if the prompt has the same tools."""

    index: int
    status: str
    finish_reason: str | None
    reward: float | None
    advantage: float | None
    reward_parts: Mapping[str, float]
    error: str
    failure: str | None
    text: str
    turns: tuple[Turn, ...]
    tools: Tools
    calls: tuple[CallView, ...]
    tokens: int
    counted_tokens: int
    tokens_by_version: Mapping[int, int]
    worker: str
    judge: str
    judge_s: float | None
    sampling: Mapping[str, Any]
    segments: tuple[SegmentView, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """One group at `now_ms`. `step` is the train step that claimed it, or else the step for which it was admitted.
    `problem` says why samples are not shown, or is ""."""

    task: str
    group_id: int
    status: str
    now_ms: int
    step: int | None
    events: tuple[Event, ...]
    prompt: tuple[Turn, ...]
    tools: Tools
    answer: Any
    images: int
    reward: float | None
    error: str
    problem: str
    samples: tuple[SampleView, ...]


def view_of(group: FoundGroup, pieces: Pieces | None = None) -> GroupView:
    """A group's view. `pieces` returns tokens' texts."""
    shaped = orjson.loads(group.fields.get("shaped") or "{}")
    samples = tuple(
        _sample_view(index, sample, letter, shaped, pieces, group.prompt)
        for index, (sample, letter) in enumerate(zip(group.samples, group.fields["letters"], strict=True))
    )
    return GroupView(
        task=group.task,
        group_id=group.group_id,
        status=group.status.value,
        now_ms=group.server_ms,
        step=group.batch.step if group.batch else _number(group.fields.get("step")),
        events=tuple(_events(group)),
        prompt=prompt_turns(group.prompt),
        tools=_tools(group.prompt.tools),
        answer=group.prompt.answer,
        images=len(group.prompt.images),
        reward=_mean_reward(group, samples),
        error=group.fields.get("error", ""),
        problem=group.problem,
        samples=samples,
    )


def _mean_reward(group: FoundGroup, samples: Sequence[SampleView]) -> float | None:
    """The mean over the shown samples, or else the stored mean."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards:
        return sum(rewards) / len(rewards)
    return float(group.fields["reward"]) if "reward" in group.fields and "c" in group.fields["letters"] else None


def prompt_turns(prompt: Prompt) -> tuple[Turn, ...]:
    """The messages of a prompt; a text is a user message."""
    if isinstance(prompt.content, str):
        return (Turn("user", prompt.content),)
    return tuple(map(_turn, prompt.content))


# -- life


def _events(group: FoundGroup) -> Iterator[Event]:
    yield Event(_number(group.fields.get("admitted_ms")), _admission(group.fields))
    for lease in group.leases:
        yield Event(lease.from_ms, f"leased to {lease.worker} with version {lease.version} (attempt {lease.attempt})")
        if lease.until_ms is not None:
            yield Event(lease.until_ms, _end_of(lease))
    if group.status is Status.RUNNING:
        yield Event(None, _running(group))
    yield from _training(group)
    if now := "is in the archive" if group.is_archived else _NOW.get(group.status):
        yield Event(None, now)


def _training(group: FoundGroup) -> Iterator[Event]:
    if group.batch:
        yield Event(group.batch.claimed_ms, f"claimed for step {group.batch.step}")
        if group.batch.committed_ms is not None:
            yield Event(group.batch.committed_ms, f"trained: step {group.batch.step} was committed")
    elif "left" in group.fields:
        yield from _departure(group.fields)


def _departure(fields: Mapping[str, str]) -> Iterator[Event]:
    """How a group that waits for the archive left the batches."""
    step = fields.get("trained_step")
    if step and fields["left"] == "trained":
        yield Event(_number(fields["claimed_ms"]), f"claimed for step {step}")
        yield Event(_number(fields["committed_ms"]), f"trained: step {step} was committed")
    else:
        yield Event(_number(fields.get("left_ms")), f"dropped: {fields['left']}")


def _admission(fields: Mapping[str, str]) -> str:
    if "copy_of" in fields:
        return f"admitted as group {fields['copy_of']}; this is a copy of it, to be trained again"
    if "source" in fields:
        return f"inserted from {fields['source']}"
    kind = "for the evaluation of step" if fields.get("eval") == "1" else "for step"
    row = f", row {fields['row']} of the prompts" if "row" in fields else ""
    return f"admitted {kind} {fields.get('step', '?')}{row}"


_ENDS: Mapping[str, str] = {
    "put": "put",
    "handed_back": "handed back by the worker; the try does not count",
    "error": "handed back by the worker after an error",
    "ran_out": "the lease ran out: the worker died, or was cut off from the server",
    "unconfirmed": "the lease ran out: it never reached its worker",
    "batch_ended": "interrupted: its batch ended without it",
    "dropped": "interrupted: the group was dropped",
    "quarantined": "interrupted: the group was quarantined by hand",
}
_NOW: Mapping[Status, str] = {
    Status.PENDING: "waits for a worker",
    Status.COMPLETED: "waits for the trainer",
    Status.GATHERED: "waits for the rest of its batch or evaluation",
    Status.ABORTED: "was interrupted, and waits to be continued",
    Status.EXPIRED: "became too stale, and waits to be sampled again",
    Status.COOLING: "waits to be trained again",
    Status.FILTERED: "was filtered: it is not trained, but kept for inspection",
    Status.LEAVING: "waits for the archiver, then leaves",
    Status.FAILED: "failed: it is not trained, but kept for inspection",
}


def _end_of(lease: PastLease) -> str:
    seconds = ((lease.until_ms or lease.from_ms) - lease.from_ms) / 1000
    return f"{_ENDS.get(lease.end, lease.end)}, after {seconds:.1f} s{_salvaged(lease)}"


def _salvaged(lease: PastLease) -> str:
    return f"; {lease.parts} parts of samples are salvaged" if lease.parts else ""


def _running(group: FoundGroup) -> str:
    left_s = ((group.deadline_ms or group.server_ms) - group.server_ms) / 1000
    salvaged = _salvaged(group.leases[-1]) if group.leases else ""
    return f"is running: its lease ends in {left_s:.0f} s unless the worker renews it{salvaged}"


# -- samples


def _sample_view(
    index: int, sample: Sample, letter: str, shaped: Mapping[str, Any], pieces: Pieces | None, prompt: Prompt
) -> SampleView:
    segments = tuple(_segment_view(segment, pieces) for segment in sample.segments)
    extra = sample.extra
    return SampleView(
        index=index,
        status=SampleStatus(letter).name.lower(),
        finish_reason=sample.finish_reason and sample.finish_reason.value,
        reward=_of(shaped.get("rewards"), index, sample.reward),
        advantage=_of(shaped.get("advantages"), index, None),
        reward_parts=sample.reward_parts,
        error=sample.error or "",
        failure=sample.failure and sample.failure.value,
        text=sample.text,
        turns=tuple(map(_turn, _mappings(extra.get("messages")))),
        tools=_tools(() if sample.tools == prompt.tools else sample.tools),
        calls=tuple(_calls(extra.get("calls"))),
        tokens=sample.response_tokens,
        counted_tokens=sum(sum(segment.counts) for segment in segments),
        tokens_by_version=_tokens_by_version(sample),
        worker=str(extra.get("worker", "")),
        judge=str(extra.get("judge", "")),
        judge_s=_seconds(extra.get("judge_s")),
        sampling=sample.sampling,
        segments=segments,
    )


def _seconds(stored: Any) -> float | None:
    return stored if isinstance(stored, int | float) else None


def _mappings(stored: Any) -> list[Mapping[str, Any]]:
    """The mappings in a stored value, which may have any form; empty for anything but a list."""
    return [item for item in stored if isinstance(item, Mapping)] if isinstance(stored, list | tuple) else []


def _tokens_by_version(sample: Sample) -> dict[int, int]:
    counted = Counter[int]()
    for span in (span for segment in sample.segments for span in segment.versions if span.version != NO_VERSION):
        counted[span.version] += span.tokens
    return dict(sorted(counted.items()))


def _calls(stored: Any) -> Iterator[CallView]:
    """The calls of an agent as a tree, depth first."""
    children: dict[Any, list[Mapping[str, Any]]] = {}
    for fact in _mappings(stored):
        children.setdefault(fact.get("parent"), []).append(fact)
    waiting = [(fact, 0) for fact in reversed(children.pop(None, []))]
    while waiting:
        fact, depth = waiting.pop()
        segment, left_out = fact.get("segment"), fact.get("left_out")
        yield CallView(fact["number"], fact["parent"], depth, fact["tokens"], segment, str(left_out or ""))
        following = list(enumerate(children.pop(fact["number"], [])))
        waiting += [(child, depth + min(place, 1)) for place, child in reversed(following)]


def _segment_view(segment: Segment, pieces: Pieces | None) -> SegmentView:
    ids = tuple(segment.response_ids.tolist())
    mask = segment.loss_mask
    return SegmentView(
        prompt_ids=tuple(segment.prompt_ids.tolist()),
        ids=ids,
        pieces=None if pieces is None else tuple(pieces(ids)),
        versions=_versions(segment),
        counts=(True,) * len(ids) if mask is None else tuple(mask.tolist()),
        logprobs=tuple(None if math.isnan(logprob) else logprob for logprob in segment.logprobs.tolist()),
    )


def _versions(segment: Segment) -> tuple[int, ...] | None:
    versions = tuple(span.version for span in segment.versions for _ in range(span.tokens))
    return versions if all(span.version != NO_VERSION for span in segment.versions) else None


def _turn(message: Mapping[str, Any]) -> Turn:
    content = message.get("content") or ()
    texts = [content] if isinstance(content, str) else list(map(_part, content))
    if isinstance(thoughts := message.get("reasoning_content"), str):
        texts.insert(0, f"(thinks) {thoughts}")
    texts += map(_call, message.get("tool_calls") or ())
    return Turn(str(message.get("role", "?")), "\n".join(filter(None, texts)), str(message.get("name") or ""))


def _part(part: Any) -> str:
    """One part of a message: text or an image."""
    if isinstance(part, Mapping):
        return str(part["text"]) if "text" in part else f"[{part.get('type', '?')}]"
    return str(part)


def _tools(definitions: Sequence[Mapping[str, Any]]) -> Tools:
    return Tools(tuple(str(_function(tool).get("name", "?")) for tool in definitions), tuple(definitions))


def _function(value: Any) -> Mapping[str, Any]:
    """The function of a tool, or of a tool call."""
    function = value.get("function", value) if isinstance(value, Mapping) else {}
    return function if isinstance(function, Mapping) else {}


def _call(call: Any) -> str:
    function = _function(call)
    arguments = function.get("arguments", "")
    text = arguments if isinstance(arguments, str) else exact_json.dumps(arguments).decode()
    return f"-> {function.get('name', '?')}({text})"


def _of(values: Any, index: int, otherwise: float | None) -> float | None:
    return values[index] if values else otherwise


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
