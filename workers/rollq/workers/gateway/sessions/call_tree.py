"""The segments that a session's calls extend. Pure.

The first call that continues an answer extends the answer's segment. A further call opens a new segment, whose prompt
holds the shared tokens, so every token gets credit once. A new segment also begins if the chat template or the client
rewrites the history.
"""

import asyncio
from typing import Final

from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.agents.loops import Rollout
from rollq.workers.agents.turns import Turn
from rollq.workers.engines.protocol import Completion
from rollq.workers.gateway.calls import Call, CallRefused, call_id, context_full
from rollq.workers.gateway.protocols.fields import label
from rollq.workers.gateway.sessions.answered_calls import AnsweredCalls
from rollq.workers.gateway.sessions.call_nodes import Located, Node, Placement, Stretch

MOST_BYTES: Final = 128
"""The most bytes in a token. A request with more bytes than this per allowed token is refused without tokenisation."""
THREAD_BYTES: Final = 8000
"""Larger requests, in bytes, are rendered and tokenised in a thread, since all of a history that the template rewrites
is tokenised again."""


class CallTree:
    """A session's calls as a tree. `answered` has the calls with an answer."""

    def __init__(self, rollout: Rollout) -> None:
        """`most_prompt_tokens` is the length of the longest history that leaves room for a token."""
        self.answered = AnsweredCalls(rollout.tokenizer)
        self.most_prompt_tokens = rollout.max_prompt_tokens + rollout.sampling.max_tokens - 1
        self._tokenizer = rollout.tokenizer
        self._tips: dict[int, Node] = {}  # the last node of each thread
        self._continuing: dict[int, Placement] = {}  # running calls, by thread
        self._threads = 0

    async def place(self, located: Located) -> Placement:
        """Render and tokenise a call, and return its placement. The caller must then call `add` or `give_up`.

        Raises `CallRefused` for a call that is too long, and for messages or options that the chat template does not
        allow.
        """
        self._check_template_options(located.call)
        most, size = self.most_prompt_tokens + 1, located.size
        least = max(size // MOST_BYTES, len(located.call.ids or ()))
        if least > most:  # would take a minute to tokenise
            raise context_full(least, most)
        try:
            if size > THREAD_BYTES:
                conversation, extends_parent = await asyncio.to_thread(self._continued, located)
            else:
                conversation, extends_parent = self._continued(located)
        except Exception as error:  # a template may raise any exception
            raise CallRefused(f"the model's chat template does not accept these messages: {error}") from error
        return self._placed(located, conversation, extends_parent=extends_parent)

    def _check_template_options(self, call: Call) -> None:
        """Raise `CallRefused` if options of the chat template differ from the task's: a session has one rendering."""
        own, missing = self._tokenizer.template_options, object()
        for name, value in call.template_options.items():
            if own.get(name, missing) != value:
                raise CallRefused(
                    f"chat_template_kwargs: {label(name)} is not what the task has; set rows.template_options of the "
                    "task instead"
                )

    def _placed(self, located: Located, conversation: Conversation, *, extends_parent: bool) -> Placement:
        """Note that a rendered call is running, and return its placement."""
        parent = located.parent
        is_first = extends_parent and parent is not None and self._is_free(parent)
        if extends_parent and not is_first:
            conversation = conversation.branched()
        context = conversation.context
        thread, delta = self._new_thread(), context
        if is_first and parent is not None:
            thread, delta = parent.thread, context[parent.end.context_tokens :].copy()
        placement = Placement(located, conversation, context, delta, thread)
        self._continuing[thread] = placement
        return placement

    async def count_tokens(self, call: Call) -> int:
        """The number of tokens in a call's prompt. Raises `CallRefused`."""
        placement = await self.place(self.answered.locate(call))
        self.give_up(placement)
        return len(placement.context)

    def give_up(self, placement: Placement) -> None:
        """Forget a call that gets no answer."""
        if self._continuing.get(placement.thread) is placement:
            del self._continuing[placement.thread]

    def add(
        self,
        placement: Placement,
        conversation: Conversation,
        completion: Completion,
        turn: Turn,
        *,
        number: int,
        stop_text: str | None,
    ) -> None:
        """Add the answer to a placed call; `conversation` ends with this answer."""
        self.give_up(placement)
        located = placement.located
        if placement.conversation.segment is None or located.parent is None:
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

    def _continued(self, located: Located) -> tuple[Conversation, bool]:
        """The conversation that the model continues, and whether it extends the parent's tokens. Changes nothing, so it
        may run in a thread."""
        call, parent = located.call, located.parent
        if not located.messages:
            return self._continued_text(call, parent)
        if parent is None:
            return Conversation.begin(self._tokenizer, located.rest, located.tools), False
        before, rest = parent.conversation, [_with_model_ids(message, parent) for message in located.rest]
        if located.tools != parent.tools:
            return Conversation.begin(self._tokenizer, (*before.preferred, *rest), located.tools), False
        after = before.after_environment(rest)
        return after, after.segment is not None

    def _continued_text(self, call: Call, parent: Node | None) -> tuple[Conversation, bool]:
        if parent is None:
            text = self._tokenizer.decode(list(call.ids), special=True) if call.ids is not None else call.text or ""
            return Conversation.begin_with(self._tokenizer, text, call.ids), False
        before = parent.conversation
        if call.ids is not None:
            rest = list(call.ids[len(before.context) :])
            return before.after_text(self._tokenizer.decode(rest, special=True), rest), True
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
