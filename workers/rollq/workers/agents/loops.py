"""Agent loops: how one sample comes about, from a prompt to its last token.

Invariant: tokens that exist already (a rollout that was interrupted) are continued, never made again, and keep the
versions that made them. A loop returns a sample that is completed, aborted or failed with a reason; rewards come later.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol

import numpy as np

from rollq.buffer.rollouts import (
    FinishReason,
    Int32Array,
    NamedArrays,
    Prompt,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.workers.agents.stop_strings import cut_at_stop_string
from rollq.workers.engines.protocol import Completion, Request, Sampling, Tokenizer, parse_reason

STATUS_OF: Final = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.COMPLETED,
    FinishReason.TOOL_CALLS: SampleStatus.COMPLETED,
    FinishReason.ABORT: SampleStatus.ABORTED,
    FinishReason.ERROR: SampleStatus.FAILED,
}


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sample to generate. `previous` is what earlier attempts left of it; `sampling` includes its seed.

    `session` names this attempt at this sample, and no other: put it into requests that belong together, so that they
    reach the same server. `generate` gives the engine's answer; it raises `EngineDead` when the engine is gone.
    """

    prompt: Prompt
    prompt_ids: Int32Array
    previous: Sample
    sampling: Sampling
    max_prompt_tokens: int
    priority: int
    tokenizer: Tokenizer
    generate: Callable[[Request], Awaitable[Completion]]
    session: str = ""


class AgentLoop(Protocol):
    """Makes one sample. `resumable`: it goes on from `Rollout.previous`; others get an empty one and start again."""

    resumable: ClassVar[bool]

    async def run(self, rollout: Rollout) -> Sample:
        """Make the sample. An exception fails this sample alone; `EngineDead` must be let through."""
        ...


class SingleTurn:
    """One prompt, one answer."""

    resumable: ClassVar[bool] = True

    async def run(self, rollout: Rollout) -> Sample:
        sampling = rollout.sampling
        if len(rollout.prompt_ids) > rollout.max_prompt_tokens:
            return failed(
                f"the prompt has {len(rollout.prompt_ids)} tokens, max_prompt_tokens is {rollout.max_prompt_tokens}"
            )
        segment = rollout.previous.segments[-1] if rollout.previous.segments else None
        prefix = None if segment is None else segment.response_ids
        reason = spent(prefix, sampling.max_tokens, rollout.tokenizer.eos_ids)
        if reason is None:
            left = sampling if prefix is None else replace(sampling, max_tokens=sampling.max_tokens - len(prefix))
            request = Request(rollout.prompt_ids, left, prefix_ids=prefix, priority=rollout.priority)
            completion = await rollout.generate(request)
            if prefix is not None:
                completion = cut_at_stop_string(prefix, completion, sampling.stop, rollout.tokenizer)
            reason = parse_reason(completion.finish_reason)
            segment = join(rollout.prompt_ids, segment, completion)
        ids = [] if segment is None else segment.response_ids.tolist()
        return finish(rollout, () if segment is None else (segment,), reason, rollout.tokenizer.decode(ids))


def spent(prefix: Int32Array | None, max_tokens: int, eos_ids: frozenset[int]) -> FinishReason | None:
    """How a response that exists already has ended; None when tokens are still to come."""
    if prefix is None or len(prefix) == 0:
        return None
    if int(prefix[-1]) in eos_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(prefix) >= max_tokens else None


def join(prompt_ids: Int32Array, before: Segment | None, new: Completion) -> Segment:
    """The segment `before`, with the tokens of `new` after its own; all of them new without one.

    Named arrays per token are joined too; what else `before` holds, per sample, stays as it is.
    Raises `ValueError` when the engine's logprobs, versions or arrays do not cover its tokens.
    """
    covered = sum(span.tokens for span in new.versions)
    if len(new.logprobs) != len(new.ids) or covered != len(new.ids):
        raise ValueError(
            f"the engine gave {len(new.ids)} tokens with {len(new.logprobs)} logprobs and versions for {covered}"
        )
    for name, array in new.arrays.items():
        if len(array) != len(new.ids):
            raise ValueError(f"the engine gave {len(new.ids)} tokens with {len(array)} entries of array {name!r}")
    if before is None or len(before.response_ids) == 0:
        return Segment(prompt_ids, new.ids, new.logprobs, new.versions, arrays=new.arrays)
    return Segment(
        prompt_ids=before.prompt_ids,
        response_ids=np.concatenate([before.response_ids, new.ids]),
        logprobs=np.concatenate([before.logprobs, new.logprobs]),
        versions=join_spans(before.versions, new.versions),
        loss_mask=None
        if before.loss_mask is None
        else np.concatenate([before.loss_mask, np.ones(len(new.ids), np.bool_)]),
        arrays=join_arrays(before, new),
    )


def join_arrays(before: Segment, new: Completion) -> NamedArrays:
    """The arrays of `before`, those of `new` after their namesakes.

    Raises `ValueError` for an array of `new` that does not cover the tokens of `before` in the same dtype and shape.
    """
    joined = dict(before.arrays)
    for name, array in new.arrays.items() if len(new.ids) else ():
        first = before.arrays.get(name)
        if (
            not isinstance(first, np.ndarray)
            or first.dtype != array.dtype
            or first.shape != (len(before.response_ids), *array.shape[1:])
        ):
            raise ValueError(
                f"array {name!r} of the engine is {array.dtype} {list(array.shape)}; what the first "
                f"{len(before.response_ids)} tokens have of it cannot be continued: {first!r:.80}"
            )
        joined[name] = np.concatenate([first, array])
    return joined


def join_spans(first: tuple[VersionSpan, ...], second: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
    """Spans in a row; those of the same weights that meet become one."""
    if first and second and first[-1][:2] == second[0][:2]:
        epoch, version, tokens = first[-1]
        second = (VersionSpan(epoch, version, tokens + second[0].tokens), *second[1:])
        first = first[:-1]
    return first + second


def finish(rollout: Rollout, segments: Sequence[Segment], reason: FinishReason, text: str) -> Sample:
    """The sample of these segments; empty ones are left out. Completed without a single token is failed."""
    status = STATUS_OF[reason]
    filled = tuple(segment for segment in segments if len(segment.response_ids))
    error = None
    if status is SampleStatus.COMPLETED and not filled:
        status, error = SampleStatus.FAILED, f"the engine finished ({reason.value}) without a token"
    elif status is SampleStatus.FAILED:
        error = "the engine reported an error, or no known finish reason"
    return Sample(
        segments=filled,
        status=status,
        finish_reason=reason,
        text=text,
        error=error,
        sampling=rollout.sampling.as_dict(),
    )


def failed(reason: str) -> Sample:
    """A sample without tokens that cannot be made."""
    return Sample(segments=(), status=SampleStatus.FAILED, finish_reason=FinishReason.ERROR, error=reason)


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer) -> Int32Array:
    """Ids int32 [P] of a prompt: its own, else its text, or its messages through the chat template."""
    if prompt.ids is not None:
        return np.array(prompt.ids, dtype=np.int32)
    if isinstance(prompt.content, str):
        return np.array(tokenizer.encode(prompt.content), dtype=np.int32)
    return np.array(tokenizer.chat([dict(message) for message in prompt.content]), dtype=np.int32)
