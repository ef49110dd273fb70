"""The messages of one sample and its exact tokens, turn by turn. Pure.

Invariant: what the model wrote is never tokenised again. Between two turns the chat template renders the conversation
anew; when that begins with what the tokens so far stand for, only the rest is tokenised, and joins the segment as text
of the environment: out of the loss. Where the template rewrites what came before (drops the thoughts of earlier turns,
trims spaces, ends turns in another way than the model did), a new segment begins with the whole as its prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rollq.buffer.rollouts import Int32Array, Segment, VersionSpan
from rollq.workers.agents.loops import join
from rollq.workers.engines.protocol import Completion, Tokenizer

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and what else the chat template reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One conversation after some turns.

    `rendered` is the text that the tokens of the last segment stand for, its prompt included. `segment` is the last
    one, None before its first token; `prompt_ids` int32 [P] are its prompt; `closed` are the segments before it.
    """

    tokenizer: Tokenizer
    tools: tuple[Message, ...]
    messages: tuple[Message, ...]
    rendered: str
    prompt_ids: Int32Array
    closed: tuple[Segment, ...] = ()
    segment: Segment | None = None

    @classmethod
    def begin(cls, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Message]) -> Self:
        """A conversation whose next turn is the model's."""
        rendered = tokenizer.render(messages, tools)
        return cls(tokenizer, tuple(tools), tuple(messages), rendered, _ids(tokenizer, rendered))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments so far."""
        return self.closed if self.segment is None else (*self.closed, self.segment)

    @property
    def context(self) -> Int32Array:
        """Ids int32 that the model goes on after."""
        return self.prompt_ids if self.segment is None else np.concatenate([self.prompt_ids, self.segment.response_ids])

    @property
    def response_tokens(self) -> int:
        """Tokens of all segments, those of the environment included, prompts not."""
        return sum(len(segment.response_ids) for segment in self.segments)

    def heard(self, completion: Completion) -> Self:
        """After the model's turn. Raises `ValueError` as `join` does."""
        ids = completion.ids.tolist()
        ended = bool(ids) and ids[-1] in self.tokenizer.eos_ids
        content = self.tokenizer.decode(ids[:-1] if ended else ids, special=True)
        end = self.tokenizer.decode(ids[-1:], special=True) if ended else ""
        return replace(
            self,
            messages=(*self.messages, {"role": "assistant", "content": content}),
            rendered=self.rendered + content + end,
            segment=join(self.prompt_ids, self.segment, completion) if ids else self.segment,
        )

    def answered(self, messages: Sequence[Message]) -> Self:
        """After the environment's `messages`; the next turn is the model's."""
        spoken = (*self.messages, *messages)
        rendered = self.tokenizer.render(spoken, self.tools)
        if self.segment is not None and rendered.startswith(self.rendered):
            new = _ids(self.tokenizer, rendered[len(self.rendered) :])
            return replace(self, messages=spoken, rendered=rendered, segment=with_environment(self.segment, new))
        return replace(
            self,
            messages=spoken,
            rendered=rendered,
            prompt_ids=_ids(self.tokenizer, rendered),
            closed=self.segments,
            segment=None,
        )


def with_environment(segment: Segment, ids: Int32Array) -> Segment:
    """The segment with `ids` int32 [E] after its tokens, which the environment wrote.

    They are out of the loss, with logprob 0, and 0 in arrays per token. They count as of the version of the token
    before them: they make a sample neither older nor younger than the model's own tokens do.
    """
    added, before = len(ids), len(segment.response_ids)
    if not added:
        return segment
    mask = np.ones(before, np.bool_) if segment.loss_mask is None else segment.loss_mask
    epoch, version, tokens = segment.versions[-1]
    return replace(
        segment,
        response_ids=np.concatenate([segment.response_ids, ids]),
        logprobs=np.concatenate([segment.logprobs, np.zeros(added, np.float32)]),
        loss_mask=np.concatenate([mask, np.zeros(added, np.bool_)]),
        versions=(*segment.versions[:-1], VersionSpan(epoch, version, tokens + added)),
        arrays={
            name: np.concatenate([array, np.zeros((added, *array.shape[1:]), array.dtype)])
            if isinstance(array, np.ndarray) and array.shape[:1] == (before,)
            else array
            for name, array in segment.arrays.items()
        },
    )


def _ids(tokenizer: Tokenizer, text: str) -> Int32Array:
    return np.array(tokenizer.encode(text), dtype=np.int32)
