"""One sample's messages and exact tokens, turn by turn. Pure.

Invariant: text that the model wrote is never tokenised again. Between two turns, the chat template renders the whole
conversation. If the result starts with the text of the tokens so far, only the rest is tokenised and appended to the
segment as the environment's text, outside the loss. If the template rewrites earlier text (drops earlier thoughts,
trims spaces, ends turns differently from the model), a new segment starts, and the whole rendering is its prompt. If a
model's turn can be written as messages of several forms, the conversation uses the first form that needs no new
segment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rollq.buffer.values.rollouts import Int32Array, Segment, VersionSpan
from rollq.workers.agents.segments import first_tokens, join, padded_arrays
from rollq.workers.agents.template_forms import for_template, tools_for_template
from rollq.workers.engines.protocol import Completion, Tokenizer

Message = Mapping[str, Any]
"""A chat message: `role`, `content`, and other fields that the chat template reads."""


@dataclass(frozen=True, slots=True)
class ConversationEnd:
    """An earlier end of a conversation: its messages, its `forms` and `preferred` messages, the number of `characters`
    in its text and of `closed` segments, and the numbers of prompt and response tokens in its last segment."""

    messages: tuple[Message, ...]
    forms: tuple[Message, ...]
    preferred: tuple[Message, ...]
    characters: int
    closed: int
    prompt_tokens: int
    response_tokens: int

    @property
    def context_tokens(self) -> int:
        """The number of tokens in the last segment, which the model continues."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """One conversation after some turns.

    `rendered` is the text of the last segment's tokens, including the prompt. `segment` is the last segment, None
    before its first token. `prompt_ids` int32 [P] hold its prompt. `closed` holds the earlier segments. `forms` holds
    messages that may replace the model's last turn, the preferred message first. `preferred` holds `messages` in their
    preferred forms.
    """

    tokenizer: Tokenizer
    tools: tuple[Message, ...]
    messages: tuple[Message, ...]
    rendered: str
    prompt_ids: Int32Array
    closed: tuple[Segment, ...] = ()
    segment: Segment | None = None
    forms: tuple[Message, ...] = ()
    preferred: tuple[Message, ...] = ()

    @classmethod
    def begin(cls, tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Message]) -> Self:
        """A conversation whose next turn is the model's. Raises `ValueError` if the last message is the assistant's."""
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError("the messages end with the assistant's, which only the agent loop single_turn continues")
        conversation, tools = for_template(tokenizer, messages), tools_for_template(tokenizer, tools)
        rendered = tokenizer.render(conversation, tools)
        prompt_ids = _ids(tokenizer, rendered)
        return cls(tokenizer, tools, conversation, rendered, prompt_ids, preferred=conversation)

    @classmethod
    def begin_with(cls, tokenizer: Tokenizer, text: str, ids: Sequence[int] | None = None) -> Self:
        """A conversation without messages: the model continues `text`, whose token ids are `ids`; without `ids` it is
        tokenised."""
        prompt_ids = np.array(tokenizer.encode_prompt(text) if ids is None else ids, np.int32)
        return cls(tokenizer, (), (), text, prompt_ids)

    def after_text(self, text: str, ids: Sequence[int] | None = None) -> Self:
        """The conversation after the environment's `text`, with token ids `ids` if given; the next turn is the
        model's."""
        new = _ids(self.tokenizer, text) if ids is None else np.array(ids, np.int32)
        segment = None if self.segment is None else with_environment(self.segment, new)
        prompt_ids = np.concatenate([self.prompt_ids, new]) if self.segment is None else self.prompt_ids
        return replace(self, rendered=self.rendered + text, prompt_ids=prompt_ids, segment=segment, forms=())

    def branched(self) -> Self:
        """This conversation in a new segment, with the whole conversation so far as its prompt."""
        return replace(self, prompt_ids=self.context, closed=(), segment=None)

    def resumed(self, messages: Sequence[Message], segments: Sequence[Segment]) -> Self:
        """This conversation, which has just started, continued by `messages`, whose tokens are in `segments`.

        The last message is not the model's. Raises `ValueError` if the first segment has a different opening.
        """
        if not np.array_equal(segments[0].prompt_ids, self.prompt_ids):
            raise ValueError("the conversation cannot be continued: its opening has changed since it was interrupted")
        conversation = (*self.messages, *messages)
        rendered = self.tokenizer.render(conversation, self.tools)
        last = segments[-1]
        continues = last.loss_mask is not None and not last.loss_mask[-1]  # ends with the environment's text
        return replace(
            self,
            messages=conversation,
            rendered=rendered,
            prompt_ids=last.prompt_ids if continues else _ids(self.tokenizer, rendered),
            closed=tuple(segments[:-1] if continues else segments),
            segment=last if continues else None,
            preferred=conversation,
        )

    @property
    def end(self) -> ConversationEnd:
        """The point where this conversation ends."""
        response_tokens = 0 if self.segment is None else len(self.segment.response_ids)
        sizes = (len(self.rendered), len(self.closed), len(self.prompt_ids), response_tokens)
        return ConversationEnd(self.messages, self.forms, self.preferred, *sizes)

    def until(self, end: ConversationEnd) -> Self:
        """This conversation at an earlier `end`, after a model's turn in the same segment. Tokens are not copied."""
        if self.segment is None or len(self.segment.response_ids) == end.response_tokens:
            return self
        return replace(
            self,
            messages=end.messages,
            forms=end.forms,
            preferred=end.preferred,
            rendered=self.rendered[: end.characters],
            segment=first_tokens(self.segment, end.response_tokens),
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All segments so far."""
        return self.closed if self.segment is None else (*self.closed, self.segment)

    @property
    def context(self) -> Int32Array:
        """The token ids int32 that the model continues: the last segment's prompt and response."""
        return self.prompt_ids if self.segment is None else np.concatenate([self.prompt_ids, self.segment.response_ids])

    @property
    def response_tokens(self) -> int:
        """The number of response tokens in all segments, including the environment's tokens."""
        return sum(len(segment.response_ids) for segment in self.segments)

    def after_model(self, completion: Completion, end_ids: frozenset[int] | None = None) -> Self:
        """The conversation after the model's turn. A final token of `end_ids`, by default the EOS tokens, is not part
        of the message.

        Raises `ValueError` as `join` does.
        """
        ids = completion.ids.tolist()
        ended = bool(ids) and ids[-1] in (self.tokenizer.eos_ids if end_ids is None else end_ids)
        content = self.tokenizer.decode(ids[:-1] if ended else ids, special=True)
        end = self.tokenizer.decode(ids[-1:], special=True) if ended else ""
        message = {"role": "assistant", "content": content}
        return replace(
            self,
            messages=(*self.messages, message),
            rendered=self.rendered + content + end,
            segment=join(self.prompt_ids, self.segment, completion) if ids else self.segment,
            forms=(message,),
            preferred=(*self.preferred, message),
        )

    def with_forms(self, forms: Sequence[Message]) -> Self:
        """This conversation with other messages for its last turn, which must be the model's."""
        return replace(
            self,
            messages=(*self.messages[:-1], forms[0]),
            forms=tuple(forms),
            preferred=(*self.preferred[:-1], forms[0]),
        )

    def after_environment(self, messages: Sequence[Message]) -> Self:
        """The conversation after the environment's `messages`; the next turn is the model's.

        Raises the chat template's error if the template accepts no form of the model's turn.
        """
        messages = for_template(self.tokenizer, messages)
        histories = [(*self.messages[:-1], form, *messages) for form in self.forms] or [(*self.messages, *messages)]
        preferred = (*self.preferred, *messages)
        for history, rendered in self._renderings(histories):
            if self.segment is not None and rendered.startswith(self.rendered):
                new = _ids(self.tokenizer, rendered[len(self.rendered) :])
                segment = with_environment(self.segment, new)
                return replace(
                    self, messages=history, rendered=rendered, segment=segment, forms=(), preferred=preferred
                )
        history, rendered = next(self._renderings([preferred, *histories]))
        return replace(
            self,
            messages=history,
            rendered=rendered,
            prompt_ids=_ids(self.tokenizer, rendered),
            closed=self.segments,
            segment=None,
            forms=(),
            preferred=preferred,
        )

    def _renderings(self, histories: Sequence[tuple[Message, ...]]) -> Iterator[tuple[tuple[Message, ...], str]]:
        """The histories that the chat template accepts, each with its rendering. If it accepts none, raises the
        template's error for the last history."""
        accepted = False
        for place, history in enumerate(histories, start=1):
            try:
                rendered = self.tokenizer.render(history, self.tools)
            except Exception:  # a template may raise any exception
                if place == len(histories) and not accepted:
                    raise
                continue
            accepted = True
            yield history, rendered


def with_environment(segment: Segment, ids: Int32Array) -> Segment:
    """The segment with the environment's `ids` int32 [E] appended.

    The new tokens are outside the loss, with logprob 0 and zeros in per-token arrays. They get the preceding token's
    version, so the sample's staleness does not change.
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
        arrays=padded_arrays(segment, added),
    )


def _ids(tokenizer: Tokenizer, text: str) -> Int32Array:
    return np.array(tokenizer.encode(text), dtype=np.int32)
