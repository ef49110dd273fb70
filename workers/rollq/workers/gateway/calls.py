"""A harness's calls and their answers, independent of the protocol. Pure.

A protocol parses a request's body into a `Call`, and writes an `Answer` or a `CallRefused` in the protocol's format.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.tool_calls import ToolCall

ToolChoice = Literal["auto", "none", "required"]


class CallRefused(Exception):
    """A call that gets no answer. Each protocol has an error format.

    `status` is the HTTP status; only 400 keeps every client from retrying. `code` is OpenAI's, such as
    `CONTEXT_FULL`, or rollq's own, such as `session_over`. For 429 and 503, `retry_after_s` is the number of seconds
    until the next try.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_request", retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


CONTEXT_FULL = "context_full"
"""The code of a call whose messages leave no room for an answer. A client that sees this code compacts its history."""


def context_full(tokens: int, most_tokens: int) -> CallRefused:
    """The refusal of a call whose messages have `tokens` tokens. Claude Code and LangChain search for its words."""
    return CallRefused(f"prompt is too long: {tokens} tokens > {most_tokens} maximum", code=CONTEXT_FULL)


MOST_MESSAGES: Final = 10_000
"""The largest number of messages in a request; more would block the worker's event loop."""


def session_over() -> CallRefused:
    """The refusal of a call to a session that is over."""
    return CallRefused("this session is over", code="session_over")


def too_many_messages(messages: int) -> CallRefused:
    """The refusal of a call with more messages than `MOST_MESSAGES`."""
    return CallRefused(f"the request has {messages} messages, more than {MOST_MESSAGES}")


def call_id(number: int, index: int) -> str:
    """The caller's id for tool call `index` in answer `number`, unique within the session. Ids that the model wrote are
    ignored. While `number` has at most three digits and `index` at most two, the id has the nine letters and digits
    that Mistral's templates ask for.
    """
    return f"call{number:03}{index:02}"


@dataclass(frozen=True, slots=True)
class Call:
    """One request to the model.

    `messages` holds chat messages in the form that chat templates read: `role` (system, user, assistant, tool) and
    `content` (a string); an assistant's message also has `reasoning_content` (a string) and `tool_calls` (`{"id",
    "type": "function", "function": {"name", "arguments": JSON}}`), and a tool's message has `tool_call_id` and `name`.
    A completion has a `text` or `ids` instead, and no messages. `tools` holds definitions as in chat completions.
    `max_tokens`, `stop` and `schema`, the answer's JSON schema, are as requested. `repeats` counts how often the client
    says it has sent this request before. `template_options` must be the task's. `ignored` names the parts of the
    request without effect.
    """

    model: str
    messages: tuple[Message, ...] = ()
    text: str | None = None
    ids: tuple[int, ...] | None = None
    tools: tuple[Message, ...] = ()
    tool_choice: ToolChoice = "auto"
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    stream: bool = False
    repeats: int = 0
    template_options: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's turn, as sent to the caller.

    `number` counts a session's calls, from 0. It determines the ids of the answer and its items; `call_id` makes the
    tool calls' ids. `content` and `reasoning` are strings without the `stop_text` that ended them. `calls` holds the
    tool calls that could be parsed. Token counts are the engine's.
    """

    number: int
    content: str
    reasoning: str | None
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    stop_text: str | None
    prompt_tokens: int
    response_tokens: int
    reasoning_tokens: int
    created_s: int


class CallProtocol(Protocol):
    """The protocol of one kind of client."""

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Call:
        """Parse a request with this JSON body; names in `headers` are in lower case.

        Raises `CallRefused`, which names the field, for a request that cannot be served.
        """

    def answer(self, call: Call, body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
        """The answer, as JSON, to a request that does not stream."""

    def events(self, call: Call, body: Mapping[str, Any], answer: Answer) -> Iterator[bytes]:
        """The answer to a request that streams: server-sent events, each with its blank line."""

    def error(self, refused: CallRefused) -> dict[str, Any]:
        """An error's body as JSON."""

    def error_events(self, call: Call, refused: CallRefused) -> Iterator[bytes]:
        """The end of a stream that started and gets no answer: server-sent events."""
