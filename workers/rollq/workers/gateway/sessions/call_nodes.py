"""The values in a tree of calls: located calls, placed calls, and nodes with answers. Pure."""

from dataclasses import dataclass

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import FinishReason, Int32Array
from rollq.workers.agents.conversation import Conversation, ConversationEnd, Message
from rollq.workers.agents.turns import Turn
from rollq.workers.gateway.calls import Call


@dataclass(slots=True, eq=False)
class Stretch:
    """The conversation of calls that extend one segment, up to the newest call. Earlier calls' conversations are cut
    from it, so a long session holds its text and tokens once, not once per call."""

    newest: Conversation


@dataclass(slots=True, eq=False)
class Node:
    """One answered call.

    `history`, `digest`, `messages` and `tools` are the request's. `stretch` holds the conversation, in which `end` is
    the answer's end. `thread` numbers the call's chain of segments. The call was located and answered at the counts
    `begun` and `ended`. `stop_text` is the stop text that ended the answer, if any. `left_out` is the reason why the
    call is not trained, if there is one.
    """

    number: int
    parent: "Node | None"
    history: bytes
    digest: bytes
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    stretch: Stretch
    end: ConversationEnd
    turn: Turn
    stop_text: str | None
    finish_reason: FinishReason
    thread: int
    tokens: int
    begun: int
    ended: int
    left_out: str | None = None
    children: int = 0

    @property
    def conversation(self) -> Conversation:
        """The conversation up to the end of this answer."""
        return self.stretch.newest.until(self.end)


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """A call whose history is recognised: it continues the answer of `parent`, if any, with the last `rest` of the
    `messages`, which are in the chat template's form. `history` and `digest` are the request's. `begun` is the count at
    which the call was located.
    """

    call: Call
    history: bytes
    digest: bytes
    parent: Node | None
    messages: tuple[Message, ...]
    tools: tuple[Message, ...]
    rest: tuple[Message, ...]
    begun: int

    @property
    def size(self) -> int:
        """The amount to render: bytes of JSON, characters of text, or token ids."""
        call = self.call
        return len(call.text or "") + len(call.ids or ()) + len(exact_json.dumps([self.messages, self.tools]))


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A call's placement. The model continues `context` int32 [P], all tokens of the `conversation`; `delta` int32 [D]
    holds the tokens after the parent's segment, or all tokens in a new segment."""

    located: Located
    conversation: Conversation
    context: Int32Array
    delta: Int32Array
    thread: int

    @property
    def is_opening(self) -> bool:
        """Whether the history contains no earlier answer."""
        return self.located.parent is None
