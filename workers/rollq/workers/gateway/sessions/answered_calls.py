"""A session's answered calls, and the calls that continue them. Pure.

A call sends its whole history, and continues the latest recorded answer in that history.
"""

from dataclasses import dataclass, field

import numpy as np

from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.gateway.calls import MOST_MESSAGES, Call, CallRefused, too_many_messages
from rollq.workers.gateway.sessions.accepted_messages import accepted
from rollq.workers.gateway.sessions.call_nodes import Located, Node
from rollq.workers.gateway.sessions.request_digest import (
    OPENING,
    after_answer,
    after_message,
    after_text,
    repeats_turn,
    request_digest,
)


@dataclass(slots=True)
class AnsweredCalls:
    """A session's answered calls: `nodes`, in the order of their answers."""

    tokenizer: Tokenizer
    nodes: list[Node] = field(default_factory=list)
    _by_history: dict[bytes, list[Node]] = field(default_factory=dict)
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
            return Located(call, history, digest, parent, (), call.tools, (), self.count())
        history, parent, messages, rest = self._history(accepted(call.messages, self.tokenizer))
        digest = request_digest(history, call)
        tools = parent.tools if parent is not None and parent.tools == call.tools else call.tools  # kept once
        return Located(call, history, digest, parent, messages, tools, rest, self.count())

    def add(self, node: Node) -> None:
        """Add a call with its answer."""
        self.nodes.append(node)
        self._by_history.setdefault(node.history, []).append(node)

    def count(self) -> int:
        """Count an event, in which a call is located or answered, and return the count."""
        self._events += 1
        return self._events

    def _history(
        self, messages: tuple[Message, ...]
    ) -> tuple[bytes, Node | None, tuple[Message, ...], tuple[Message, ...]]:
        """The history's digest, the model's last answer in it, all messages, and the messages after that answer."""
        history, parent, after = OPENING, None, 0
        recognised = self._known_before(messages)
        if recognised is not None:  # the recognised part is neither hashed nor kept again
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
        """Among calls whose history and answer begin these messages, the latest with the longest history."""
        # hashing would read all messages; comparing is cheap, and the longest usually matches
        for node in sorted(self.nodes, key=lambda node: (len(node.messages), node.ended), reverse=True):
            place = len(node.messages)
            if 0 < place < len(messages) and node.messages == messages[:place]:
                message = messages[place]
                if message["role"] == "assistant" and repeats_turn(message, node.turn, node.stop_text):
                    return node
        return None

    def _answer_repeated(self, history: bytes, message: Message) -> Node | None:
        for node in reversed(self._by_history.get(history, ())):
            if repeats_turn(message, node.turn, node.stop_text):
                return node
        return None

    def _text_before(self, call: Call) -> Node | None:
        """Among completions whose prompt and answer begin this completion's prompt, the longest."""
        completions = [node for node in self.nodes if not node.messages and _begins(node.conversation, call)]
        return max(completions, key=lambda node: node.end.characters, default=None)


def _begins(before: Conversation, call: Call) -> bool:
    if call.ids is not None:
        context = before.context
        return np.array_equal(np.array(call.ids[: len(context)], np.int32), context)
    return (call.text or "").startswith(before.rendered)
