"""The segments that the calls of a session extend. Pure.

The first call that continues an answer extends its segment. A further call opens a new segment, whose prompt holds the
shared tokens: every token gets credit once. If the chat template or the client rewrites the history, a new segment
begins too.
"""

from dataclasses import dataclass, field

from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.agents.turns import Turn, forms, verbatim_message
from rollq.workers.engines.protocol import Completion, Tokenizer
from rollq.workers.gateway.calls import Call, call_id
from rollq.workers.gateway.sessions.answered_calls import AnsweredCalls
from rollq.workers.gateway.sessions.call_nodes import Located, Node, Placement, Rendered, Stretch


@dataclass(slots=True)
class CallTree:
    """The calls of a session as a tree; `answered` has those with an answer. `verbatim` says whether conversations keep
    turns as their text (see `ChatFormat`)."""

    tokenizer: Tokenizer
    verbatim: bool
    answered: AnsweredCalls
    _tips: dict[int, Node] = field(default_factory=dict)  # the last node of each thread
    _continuing: dict[int, Placement] = field(default_factory=dict)  # running calls, by thread
    _threads: int = 0

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
            ended=self.answered.count(),
        )
        if located.parent is not None:
            located.parent.children += 1
        self.answered.add(node)
        self._tips[node.thread] = node
        return node

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


def _with_model_ids(message: Message, parent: Node) -> Message:
    """A tool's answer to a call in the parent, under the id that the model wrote."""
    ids = {call_id(parent.number, place): made.id for place, made in enumerate(parent.turn.well_formed)}
    given = message.get("tool_call_id")
    return {**message, "tool_call_id": ids[given]} if given in ids else message
