"""The calls of one session as a tree, and the segments that they make. Pure.

A call continues the latest recorded answer in its history. The first call that continues an answer extends its segment.
A further call opens a new segment, whose prompt holds the shared tokens: every token gets credit once. If the chat
template or the client rewrites the history, a new segment begins too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollq.buffer.values.rollouts import Float32Array, Segment
from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.agents.turns import Turn, forms, verbatim_message
from rollq.workers.engines.protocol import Completion, Tokenizer
from rollq.workers.gateway.calls import MOST_MESSAGES, Call, CallRefused, call_id, too_many_messages
from rollq.workers.gateway.sessions.accepted_messages import accepted
from rollq.workers.gateway.sessions.call_nodes import Located, Node, Placement, Rendered, Stretch
from rollq.workers.gateway.sessions.request_digest import (
    OPENING,
    after_answer,
    after_message,
    after_text,
    repeats_turn,
    request_digest,
)


@dataclass(slots=True)
class CallTree:
    """The calls of a session. `verbatim` says whether conversations keep turns as their text (see `ChatFormat`)."""

    tokenizer: Tokenizer
    verbatim: bool
    nodes: list[Node] = field(default_factory=list)
    _asked: dict[bytes, list[Node]] = field(default_factory=dict)  # by the history of the request
    _tips: dict[int, Node | None] = field(default_factory=dict)  # the last node of each thread, or None
    _continuing: dict[int, Placement] = field(default_factory=dict)  # running calls, by thread
    _threads: int = 0
    _events: int = 0

    def locate(self, call: Call) -> Located:
        """Recognise a call's history. Raises `CallRefused` for a request that cannot be served."""
        if len(call.messages) > MOST_MESSAGES:
            raise too_many_messages(len(call.messages))
        try:
            return self._located(call)
        except TypeError as error:  # a value that is not JSON
            raise CallRefused(f"the request cannot be read: {error}") from error

    def _located(self, call: Call) -> Located:
        if not call.messages:
            history = after_text(call.text, call.ids)
            digest, parent = request_digest(history, call), self._text_before(call)
            return Located(call, history, digest, parent, (), call.tools, (), self._count())
        history, parent, messages, rest = self._history(accepted(call.messages, self.tokenizer))
        digest = request_digest(history, call)
        tools = parent.tools if parent is not None and parent.tools == call.tools else call.tools  # kept once
        return Located(call, history, digest, parent, messages, tools, rest, self._count())

    def _count(self) -> int:
        """The count of the next event: a call is located or answered."""
        self._events += 1
        return self._events

    def is_answered(self, begun: int) -> bool:
        """Whether the call that was located at this count has an answer."""
        return any(node.begun == begun for node in self.nodes)

    def render(self, located: Located) -> Rendered:
        """Render and tokenise a call. Changes nothing, and so may run in a thread.

        Raises the chat template's error for messages that it does not accept.
        """
        return Rendered(located, *self._continued(located))

    def place(self, rendered: Rendered) -> Placement:
        """Find the place of a call. The caller must then call `add` or `give_up`."""
        located, conversation = rendered.located, rendered.conversation
        parent = located.parent
        is_first = rendered.extends_parent and parent is not None and self._is_free(parent)
        if rendered.extends_parent and not is_first:
            conversation = conversation.branched()
        context = conversation.context
        thread, delta = self._new_thread(), context
        if is_first and parent is not None:
            thread, delta = parent.thread, context[parent.end.context_tokens :].copy()
        placement = Placement(located, conversation, context, delta, thread)
        self._continuing[thread] = placement
        return placement

    def give_up(self, placement: Placement) -> None:
        """Forget a call that gets no answer."""
        if self._continuing.get(placement.thread) is placement:
            del self._continuing[placement.thread]

    def add(
        self,
        placement: Placement,
        completion: Completion,
        turn: Turn,
        *,
        number: int,
        stop_text: str | None,
        end_ids: frozenset[int],
    ) -> Node:
        """Add the answer to a placed call. Raises `ValueError` for tokens that logprobs or versions do not cover."""
        self.give_up(placement)
        before, located = placement.conversation, placement.located
        conversation = before.after_model(completion, end_ids)
        if located.messages:
            messages = (verbatim_message(turn),) if self.verbatim else forms(turn, self.tokenizer)
            conversation = conversation.with_forms(messages)
        if before.segment is None or located.parent is None:
            stretch = Stretch(conversation)
        else:
            stretch = located.parent.stretch
            stretch.newest = conversation
        node = Node(
            number=number,
            parent=located.parent,
            history=located.history,
            digest=located.digest,
            messages=located.messages,
            tools=located.tools,
            stretch=stretch,
            end=conversation.end,
            turn=turn,
            stop_text=stop_text,
            finish_reason=completion.finish_reason,
            thread=placement.thread,
            tokens=len(completion.ids),
            begun=located.begun,
            ended=self._count(),
        )
        if located.parent is not None:
            located.parent.children += 1
        self.nodes.append(node)
        self._asked.setdefault(node.history, []).append(node)
        self._tips[node.thread] = node
        return node

    def _history(
        self, messages: tuple[Message, ...]
    ) -> tuple[bytes, Node | None, tuple[Message, ...], tuple[Message, ...]]:
        """The digest of a history, the last answer of the model in it, all messages, and those after that answer."""
        history, parent, after = OPENING, None, 0
        recognised = self._known_before(messages)
        if recognised is not None:  # the recognised part is not hashed again, nor kept twice
            after = len(recognised.messages) + 1
            history, parent = after_answer(recognised.history, recognised.number), recognised
            messages = (*recognised.messages, *messages[after - 1 :])
        for place in range(after, len(messages)):
            message = messages[place]
            node = self._answer_repeated(history, message) if message["role"] == "assistant" else None
            if node is None:
                history = after_message(history, message)
            else:
                history, parent, after = after_answer(history, node.number), node, place + 1
        return history, parent, messages, messages[after:]

    def _known_before(self, messages: tuple[Message, ...]) -> Node | None:
        """The latest call with the longest history that, followed by the call's answer, begins these messages."""
        # hashing would read all messages; comparing is cheap, and the longest usually matches
        for node in sorted(self.nodes, key=lambda node: (len(node.messages), node.ended), reverse=True):
            place = len(node.messages)
            if 0 < place < len(messages) and node.messages == messages[:place]:
                message = messages[place]
                if message["role"] == "assistant" and repeats_turn(message, node.turn, node.stop_text):
                    return node
        return None

    def _answer_repeated(self, history: bytes, message: Message) -> Node | None:
        for node in reversed(self._asked.get(history, ())):
            if repeats_turn(message, node.turn, node.stop_text):
                return node
        return None

    def _text_before(self, call: Call) -> Node | None:
        """The completion with the longest prompt and answer that begin this completion's prompt."""
        completions = [node for node in self.nodes if not node.messages and _begins(node.conversation, call)]
        return max(completions, key=lambda node: node.end.characters, default=None)

    def _continued(self, located: Located) -> tuple[Conversation, bool]:
        """The conversation that the model continues, and whether it extends the parent's tokens."""
        call, parent = located.call, located.parent
        if not located.messages:
            return self._continued_text(call, parent)
        if parent is None:
            return Conversation.begin(self.tokenizer, located.rest, located.tools), False
        before, rest = parent.conversation, [_with_model_ids(message, parent) for message in located.rest]
        if located.tools != parent.tools:
            return Conversation.begin(self.tokenizer, (*before.preferred, *rest), located.tools), False
        after = before.after_environment(rest)
        return after, after.segment is not None

    def _continued_text(self, call: Call, parent: Node | None) -> tuple[Conversation, bool]:
        if parent is None:
            text = self.tokenizer.decode(list(call.ids), special=True) if call.ids is not None else call.text or ""
            return Conversation.begin_with(self.tokenizer, text, call.ids), False
        before = parent.conversation
        if call.ids is not None:
            rest = list(call.ids[len(before.context) :])
            return before.after_text(self.tokenizer.decode(rest, special=True), rest), True
        return before.after_text((call.text or "")[len(before.rendered) :]), True

    def _is_free(self, node: Node) -> bool:
        """Whether no call continues a node's segment yet."""
        return self._tips[node.thread] is node and node.thread not in self._continuing

    def _new_thread(self) -> int:
        self._threads += 1
        return self._threads

    # the sample

    def supersede(self) -> None:
        """Leave out each call that was asked again after it ended, unless another call continues it."""
        by_digest: dict[bytes, list[Node]] = {}
        for node in self.nodes:
            if node.left_out is None:
                by_digest.setdefault(node.digest, []).append(node)
        for equal in by_digest.values():
            for node in equal:
                if not node.children and any(node.ended < other.begun for other in equal):
                    node.left_out = "superseded"

    def segments(self) -> tuple[Segment, ...]:
        """The segments of all answers to train, thread by thread. A left-out answer that other calls continue is
        outside the loss."""
        return tuple(segment for nodes in self._trained_threads() for segment in _trained(nodes))

    def segment_numbers(self) -> dict[int, int]:
        """Number of each trained call -> index in `segments` of the segment with its tokens."""
        numbers: dict[int, int] = {}
        before = 0
        for nodes in self._trained_threads():
            segments = _trained_segments(nodes)
            places = {old: before + new for new, old in enumerate(segments)}
            for node in nodes:
                if node.left_out is None and node.tokens:
                    numbers[node.number] = places[node.end.closed]
            before += len(segments)
        return numbers

    def token_rewards(self, rewards: Mapping[int, float]) -> Float32Array:
        """The rewards of the response tokens of `segments`, float32 [R]. The last token of each trained answer gets its
        call's reward.
        """
        parts = [np.zeros(0, np.float32)]
        for nodes in self._trained_threads():
            segments = nodes[-1].conversation.segments
            for place in _trained_segments(nodes):
                part = np.zeros(len(segments[place].response_ids), np.float32)
                for node in nodes:
                    if node.left_out is None and node.tokens and node.end.closed == place:
                        part[node.end.response_tokens - 1] = rewards.get(node.number, 0.0)
                parts.append(part)
        return np.concatenate(parts)

    def _trained_threads(self) -> Iterator[list[Node]]:
        """The calls of each thread up to the last trained call."""
        for thread in sorted(self._tips):
            nodes = [node for node in self.nodes if node.thread == thread]
            while nodes and nodes[-1].left_out is not None:
                nodes.pop()
            if nodes:
                yield nodes


def _with_model_ids(message: Message, parent: Node) -> Message:
    """A tool's answer to a call in the parent, under the id that the model wrote."""
    ids = {call_id(parent.number, place): made.id for place, made in enumerate(parent.turn.well_formed)}
    given = message.get("tool_call_id")
    return {**message, "tool_call_id": ids[given]} if given in ids else message


def _begins(before: Conversation, call: Call) -> bool:
    if call.ids is not None:
        context = before.context
        return np.array_equal(np.array(call.ids[: len(context)], np.int32), context)
    return (call.text or "").startswith(before.rendered)


def _trained_segments(nodes: Sequence[Node]) -> list[int]:
    """For each segment of a thread, whether it has a trained token."""
    return sorted({node.end.closed for node in nodes if node.left_out is None and node.tokens})


def _trained(nodes: Sequence[Node]) -> list[Segment]:
    """The segments of a thread that have a trained token. Tokens of answers that are left out are outside the loss."""
    segments = nodes[-1].conversation.segments
    return [_masked(segments[place], place, nodes) for place in _trained_segments(nodes)]


def _masked(segment: Segment, place: int, nodes: Iterable[Node]) -> Segment:
    """Segment number `place` of a thread, without the tokens of answers that are left out."""
    mask = None
    for node in nodes:
        if node.left_out is None or not node.tokens or node.end.closed != place:
            continue
        if mask is None:
            mask = (
                np.ones(len(segment.response_ids), np.bool_) if segment.loss_mask is None else segment.loss_mask.copy()
            )
        end = node.end.response_tokens
        mask[end - node.tokens : end] = False
    return segment if mask is None else replace(segment, loss_mask=mask)


def as_facts(nodes: Iterable[Node], segments: dict[int, int]) -> list[dict[str, Any]]:
    """The facts about each call: its number, its parent's number, its segment, and why it is left out."""
    return [
        {
            "number": node.number,
            "parent": None if node.parent is None else node.parent.number,
            "segment": segments.get(node.number),
            "tokens": node.tokens,
            "left_out": node.left_out,
        }
        for node in sorted(nodes, key=lambda node: node.number)
    ]
