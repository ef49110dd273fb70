"""Finished conversations as samples: the assistant wrote some turns, and the loss counts these turns. Every turn is
rendered as for the model: a turn's tokens are the chat template's text after the earlier conversation, up to the
end-of-sequence token. Turns share a segment as long as the template keeps earlier turns unchanged; a template that
drops earlier reasoning starts another segment.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, Sample, SampleStatus, Segment, absent_logprobs, unversioned
from rollq.workers.agents.template_forms import for_template, tools_for_template
from rollq.workers.engines.protocol import Tokenizer

ASSISTANT: Final = "assistant"
WEIGHT: Final = "weight"
"""Key in an assistant's message, 0 if the loss leaves the message out, as in OpenAI's files for fine-tuning."""

Message = Mapping[str, Any]


class _Turn(NamedTuple):
    before: list[int]
    written: list[int]
    counts: bool


def first_turn(messages: Any) -> int | None:
    """The index of the assistant's first message in a column `messages`; None without one."""
    if not isinstance(messages, list):
        return None
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    return roles.index(ASSISTANT) if ASSISTANT in roles else None


def check_conversation(messages: Sequence[Any], tools: Any) -> None:
    """Raise `ValueError` for messages and tools that no chat template renders."""
    for index, message in enumerate(messages):
        _check_message(index, message)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"field 'tools' is {tools!r:.80}, expected a list of objects")


def _check_message(index: int, message: Any) -> None:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"message {index} is {message!r:.80}, expected an object with a role")
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list) and not (content is None and calls):
        raise ValueError(f"message {index}: content is {content!r:.80}, expected a string")


def conversation_sample(
    messages: Sequence[Message], tools: Sequence[Message], reward: float, tokenizer: Tokenizer
) -> Sample:
    """The sample of a conversation whose last message is the assistant's.

    Raises `ValueError` for any other last message, if no turn counts, or if the chat template does not render turns as
    continuations.
    """
    if messages[-1].get("role") != ASSISTANT:
        raise ValueError(f"the last message has role {messages[-1].get('role')!r}, expected 'assistant'")
    turns = [_turn(messages, tools, index, tokenizer) for index in _turns(messages)]
    if not any(turn.counts for turn in turns):
        raise ValueError(f"every assistant's message has {WEIGHT} 0, so there is nothing to learn from")
    return Sample(
        segments=tuple(_segments(turns)),
        status=SampleStatus.COMPLETED,
        finish_reason=FinishReason.STOP,
        reward=reward,
        text=tokenizer.decode(turns[-1].written),
        extra={"turns": len(turns)},
    )


def _turns(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == ASSISTANT]


def _turn(messages: Sequence[Message], tools: Sequence[Message], index: int, tokenizer: Tokenizer) -> _Turn:
    weight = messages[index].get(WEIGHT, 1)
    if weight not in (0, 1):
        raise ValueError(f"message {index}: {WEIGHT} is {weight!r}, expected 0 or 1")
    plain = [{key: value for key, value in message.items() if key != WEIGHT} for message in messages[: index + 1]]
    shown, given = for_template(tokenizer, plain), tools_for_template(tokenizer, tools)
    before, after = tokenizer.chat(shown[:-1], given), tokenizer.chat(shown, given)
    end = next((at for at, token in enumerate(after[len(before) :]) if token in tokenizer.eos_ids), None)
    if after[: len(before)] != before or end is None:
        raise ValueError(
            f"message {index}: the chat template does not render it as the end of the conversation before it and an "
            "end-of-sequence token; give token ids with `Buffer.insert`"
        )
    return _Turn(before, after[len(before) : len(before) + end + 1], bool(weight))


def _segments(turns: Sequence[_Turn]) -> list[Segment]:
    prompts, responses, masks = list[list[int]](), list[list[int]](), list[list[bool]]()
    for turn in turns:
        held = prompts[-1] + responses[-1] if prompts else []
        if not prompts or turn.before[: len(held)] != held:
            prompts.append(turn.before)
            responses.append([])
            masks.append([])
            held = turn.before
        between = turn.before[len(held) :]
        responses[-1] += between + turn.written
        masks[-1] += [False] * len(between) + [turn.counts] * len(turn.written)
    parts = zip(prompts, responses, masks, strict=True)
    return [_segment(prompt, response, mask) for prompt, response, mask in parts if any(mask)]


def _segment(prompt: Sequence[int], response: Sequence[int], mask: Sequence[bool]) -> Segment:
    return Segment(
        prompt_ids=np.array(prompt, np.int32),
        response_ids=np.array(response, np.int32),
        logprobs=absent_logprobs(len(response)),
        versions=unversioned(len(response)),
        loss_mask=None if all(mask) else np.array(mask, np.bool_),
    )
