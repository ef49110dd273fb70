"""Calls to a session in tests, without HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rollq.buffer.values.rollouts import EMPTY_SAMPLE, Lease, Prompt, Sample, SamplePart
from rollq.buffer.wire.frame_encoding import encode_samples
from rollq.buffer.wire.parts import decode_parts, encode_part, rest_of
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.conversation import Message
from rollq.workers.gateway.calls import Answer, Call
from rollq.workers.gateway.sessions.asked_calls import SessionLimits
from rollq.workers.gateway.sessions.session import Session
from support.chat_engine import Model, rollout
from support.waiting import PATIENCE_S

T = TypeVar("T")
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


@dataclass
class Connection:
    """A client's connection."""

    is_lost: bool = False
    is_served: bool = False


@dataclass
class Client:
    """Asks one session, and keeps the messages of a conversation as clients do."""

    session: Session
    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()

    async def say(self, text: str, **fields: Any) -> Answer:
        """Add a user's message, ask, and add the answer."""
        self.messages += ({"role": "user", "content": text},)
        return await self.ask(**fields)

    async def ask(self, **fields: Any) -> Answer:
        """Ask with the messages so far, and add the answer."""
        answer = await serve(self.session, self.call(**fields))
        self.messages += (as_message(answer),)
        return answer

    def call(self, **fields: Any) -> Call:
        return replace(Call(model="rollq", messages=self.messages, tools=self.tools), **fields)


def as_message(answer: Answer) -> Message:
    """An answer as a client sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw_arguments}}
            for call in answer.calls
        ]
    return message


def ask(session: Session, call: Call, connection: Connection) -> asyncio.Task[Answer]:
    """Ask a session for the answer to a call."""
    return session.calls.ask(call, connection)


async def serve(session: Session, call: Call) -> Answer:
    """The answer to a call, whose last byte has reached its client."""
    connection = Connection()
    answer = await ask(session, call, connection)
    connection.is_served = True
    return answer


def make_session(
    model: Model,
    *,
    previous: Sample = EMPTY_SAMPLE,
    tool_parser: str = "hermes",
    recorded: list[Sample] | None = None,
    limits: SessionLimits | None = None,
    prompt: str = "6*7?",
    **lengths: Any,
) -> Session:
    """A session with a model; `recorded` gets the sample at every call that is recorded."""

    async def record(sample: Sample) -> bool:
        assert recorded is not None
        recorded.append(sample)
        return True

    made = replace(
        rollout(model, Prompt(prompt), **lengths), previous=previous, record=None if recorded is None else record
    )
    return Session(made, make_format(tool_parser), limits or SessionLimits())


def as_stored(recorded: Sequence[Sample], before: Sample = EMPTY_SAMPLE) -> Sample:
    """The last of `recorded`, as the next attempt gets it: from the parts that the buffer has. An attempt that began
    with `before` recorded them."""
    lease = Lease("math", 0, 1, "nonce", 1, Prompt(""), (EMPTY_SAMPLE,), 1)
    parts, tokens = {} if before is EMPTY_SAMPLE else {0: encode_samples([before])}, before.response_tokens
    for number, sample in enumerate(recorded):
        parts[1 + number] = encode_part(SamplePart(lease, number, 0, tokens, rest_of(sample, tokens), 0))
        tokens = sample.response_tokens
    stored = decode_parts(0, parts, group_size=1)
    assert stored is not None
    return stored


def run(work: Callable[[], Awaitable[T]]) -> T:
    """Run a test's coroutine within the time that any test may take."""

    async def limited() -> T:
        return await asyncio.wait_for(asyncio.ensure_future(_awaited(work)), PATIENCE_S)

    return asyncio.run(limited())


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def ids_of(session: Session) -> Sequence[list[int]]:
    """Prompt and response of every segment of the finished sample."""
    sample = session.sample(extra={})
    return [[*segment.prompt_ids.tolist(), *segment.response_ids.tolist()] for segment in sample.segments]


def trained_tokens(sample: Sample) -> int:
    """Tokens inside the loss."""
    return sum(
        len(segment.response_ids) if segment.loss_mask is None else int(segment.loss_mask.sum())
        for segment in sample.segments
    )
