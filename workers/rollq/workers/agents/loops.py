"""Agent loops generate samples, each from its prompt to its last token.

Invariant: an interrupted rollout's tokens are continued, never generated again, and keep their versions. A loop returns
a sample that is completed, aborted, or failed with a reason. Rewards come later.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final, Protocol

import numpy as np

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Int32Array, Prompt, Sample, SampleStatus, Segment
from rollq.workers.agents.image_prompts import ImageTokenizer
from rollq.workers.agents.segments import continued, rest_of, spent
from rollq.workers.agents.template_forms import for_template, tools_for_template
from rollq.workers.engines.protocol import Completion, Request, Sampling, Tokenizer
from rollq.workers.user_code.calls import guarded
from rollq.workers.user_code.errors import reason_of, said_by

STATUS_OF: Final = {
    FinishReason.STOP: SampleStatus.COMPLETED,
    FinishReason.LENGTH: SampleStatus.COMPLETED,
    FinishReason.TOOL_CALLS: SampleStatus.COMPLETED,
    FinishReason.ABORT: SampleStatus.ABORTED,
    FinishReason.ERROR: SampleStatus.FAILED,
}


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sample to generate. `previous` holds the tokens of earlier attempts; `sampling` includes the sample's seed.

    `session` identifies this attempt at this sample: requests with the same session reach the same server. `generate`
    asks the engine and raises `EngineDead` if the engine has died. `keep`, unless None, takes the sample so far, with
    status aborted: if this worker is killed, the next attempt gets that sample as `previous`. Each kept sample extends
    the previous one. `record` does the same and waits until the sample is kept; it returns False or raises if that
    fails. `is_stopped` returns whether the group is being stopped; requests then immediately return aborted. `at_end`
    takes functions to call after the sample is judged; they may block. This is sample `index` in a group of the `task`,
    or of an `evaluation`.
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
    keep: Callable[[Sample], None] | None = None
    record: Callable[[Sample], Awaitable[bool]] | None = None
    is_stopped: Callable[[], bool] = lambda: False
    at_end: Callable[[Callable[[], object]], object] = lambda _function: None
    task: str = ""
    index: int = 0
    evaluation: bool = False


class AgentLoop(Protocol):
    """Generates one sample. Three attributes are optional. `resumable`, a bool, is true if the loop continues
    `Rollout.previous`; other loops get an empty one. `records`, a bool, is true if the loop awaits `Rollout.record`
    instead of calling `Rollout.keep`. `sessions`, an int, limits how many samples one worker may run at a time; without
    it, the engine sets the limit."""

    async def run(self, rollout: Rollout) -> Sample:
        """Generate the sample. An exception fails only this sample; a `SampleFailed` also sets the failure's kind. The
        loop must not catch `EngineDead`."""


def is_resumable(loop: AgentLoop) -> bool:
    """Whether the loop continues `Rollout.previous`."""
    return getattr(loop, "resumable", False)


def records(loop: AgentLoop) -> bool:
    """Whether the loop records each part of the sample before it continues."""
    return getattr(loop, "records", False)


def sessions(loop: AgentLoop) -> int | None:
    """The number of samples that the loop runs at a time; None if only the engine limits it."""
    return getattr(loop, "sessions", None)


class PromptTooLong(Exception):
    """The prompt has `tokens` tokens, more than allowed."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(f"the prompt has {tokens} tokens; max_prompt_tokens is {limit}")
        self.tokens = tokens


def check_length(rollout: Rollout) -> None:
    """Raise `PromptTooLong` if the prompt is too long. The worker then drops the group, and the row is excluded."""
    if len(rollout.prompt_ids) > rollout.max_prompt_tokens:
        raise PromptTooLong(len(rollout.prompt_ids), rollout.max_prompt_tokens)


class SingleTurn:
    """One prompt, one answer."""

    resumable: ClassVar[bool] = True

    async def run(self, rollout: Rollout) -> Sample:
        """See `AgentLoop.run`."""
        sampling = rollout.sampling
        check_length(rollout)
        segment = _previous(rollout)
        prefix = None if segment is None else segment.response_ids
        reason = spent(prefix, sampling.max_tokens, sampling.end_ids(rollout.tokenizer.eos_ids))
        if segment is None or reason is None:
            report = None if rollout.keep is None else partial(self._keep, rollout, segment)
            request = Request(rollout.prompt_ids, sampling, priority=rollout.priority, report=report)
            completion = await rollout.generate(rest_of(request, segment))
            segment, reason = continued(rollout.prompt_ids, segment, completion, sampling.stop, rollout.tokenizer)
        return finish(rollout, (segment,), reason, rollout.tokenizer.decode(segment.response_ids.tolist()))

    @staticmethod
    def _keep(rollout: Rollout, before: Segment | None, new: Completion) -> None:
        """Keep the sample so far: `new` continues `before`. A malformed `new` is ignored here, and reported with the
        finished sample."""
        assert rollout.keep is not None
        with suppress(ValueError):
            made, reason = continued(rollout.prompt_ids, before, new, rollout.sampling.stop, rollout.tokenizer)
            if reason is FinishReason.ABORT:  # otherwise the cut ended the segment, unknown to the engine
                rollout.keep(finish(rollout, (made,), FinishReason.ABORT, ""))


def _previous(rollout: Rollout) -> Segment | None:
    """The segment to continue, if any. Raises `ValueError` if it comes from another loop or prompt."""
    segment = rollout.previous.segments[-1] if rollout.previous.segments else None
    if segment is not None and not np.array_equal(segment.prompt_ids, rollout.prompt_ids):
        raise ValueError("the sample cannot be continued: a different agent loop or prompt started it")
    return segment


def finish(rollout: Rollout, segments: Sequence[Segment], reason: FinishReason, text: str) -> Sample:
    """The sample with the nonempty segments. A sample that completed without a token counts as failed."""
    status = STATUS_OF[reason]
    filled = tuple(segment for segment in segments if len(segment.response_ids))
    error = None
    if status is SampleStatus.COMPLETED and not filled:
        status, error = SampleStatus.FAILED, f"the engine finished ({reason.value}) without a token"
    elif status is SampleStatus.FAILED:
        error = "the engine reported an error, or an unknown finish reason"
    return Sample(
        segments=filled,
        status=status,
        finish_reason=reason,
        text=text,
        error=error,
        failure=None if error is None else FailureKind.PROVIDER,
        sampling=rollout.sampling.as_dict(),
        tools=rollout.prompt.tools,
    )


def failed(reason: str, kind: FailureKind = FailureKind.PROGRAM) -> Sample:
    """A failed sample without tokens. The default `kind` is a failure of the loop or its program."""
    return Sample((), SampleStatus.FAILED, finish_reason=FinishReason.ERROR, error=reason, failure=kind)


def checked(made: object) -> Sample:
    """Return the sample that a loop made. Raises `TypeError` for anything else, and `ValueError` for a pending sample,
    which would be sampled again indefinitely."""
    if not isinstance(made, Sample):
        with guarded():
            raise TypeError(f"returned {made!r:.80}; expected a Sample")
    if made.status is SampleStatus.PENDING:
        raise ValueError("returned a pending sample; expected a completed, failed or aborted one")
    return made


def failed_with(error: Exception) -> Sample:
    """A failed sample without tokens, with the error's failure kind."""
    if isinstance(error, SampleFailed):
        return failed(said_by(error), error.kind)
    return failed(f"agent loop: {reason_of(error)}")


def prompt_tokens(prompt: Prompt, tokenizer: Tokenizer) -> Int32Array:
    """A prompt's token ids int32 [P]: its ids if it has any, otherwise the ids of its text with a prompt's special
    tokens, or of its messages and tools as the chat template renders them."""
    if prompt.ids is not None:
        ids = list(prompt.ids)
        return np.array(tokenizer.expand(ids) if isinstance(tokenizer, ImageTokenizer) else ids, dtype=np.int32)
    if isinstance(prompt.content, str):
        return np.array(tokenizer.encode_prompt(prompt.content), dtype=np.int32)
    messages = for_template(tokenizer, prompt.content)
    tools = tools_for_template(tokenizer, prompt.tools)
    render = tokenizer.chat_continued if messages[-1]["role"] == "assistant" else tokenizer.chat
    return np.array(render(messages, tools), dtype=np.int32)
