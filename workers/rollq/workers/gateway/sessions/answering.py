"""Answers a session's placed calls. An answer is generated or taken from the record, then parsed and recorded.

Invariant: if another attempt can continue the sample, an answer is recorded in the buffer before it is returned, so the
next attempt has all answers that a harness has seen. The next attempt answers the same requests from the record, and
samples answers only for other requests.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Final

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, Int32Array, Sample, Segment
from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.agents.loops import Rollout, finish
from rollq.workers.agents.segments import continued, rest_of, spent
from rollq.workers.agents.stop_strings import first_among
from rollq.workers.agents.tool_calls import ToolCall
from rollq.workers.agents.turns import ChatFormat, Turn, forms, verbatim_message
from rollq.workers.engines.protocol import Completion, ContextFull, EngineDead, Request, Sampling, Tokenizer
from rollq.workers.gateway.calls import CONTEXT_FULL, Answer, CallRefused, call_id, context_full, session_over
from rollq.workers.gateway.sessions.call_nodes import Placement
from rollq.workers.gateway.sessions.call_records import RecordedCall
from rollq.workers.gateway.sessions.call_tree import CallTree
from rollq.workers.gateway.sessions.request_digest import shown_calls, shown_content

MOST_IGNORED: Final = 32
"""The most names of ignored parts that a sample keeps. An agent may send any number of them."""
OTHERS: Final = "others"


class Answering:
    """Answers one session's calls. `failure` is the error that ended the session, if any; `recorded` counts the answers
    in the record at the start, and `replayed` counts the answers taken from the record. `made_tokens` counts the tokens
    of all answers. `forced` counts calls that demanded a tool call, which rollq does not enforce. `guided` counts calls
    whose answer follows a schema. `ignored` counts calls with a part that has no effect, by the part's name."""

    def __init__(self, rollout: Rollout, chat_format: ChatFormat, tree: CallTree) -> None:
        """Answers are added to `tree`. Raises `CorruptFrame` for records that cannot be read."""
        self.rollout = rollout
        self.failure: BaseException | None = None
        self.tools: tuple[Message, ...] = ()
        self.replayed = self.forced = self.guided = self.made_tokens = 0
        self.ignored: Counter[str] = Counter()
        self._tree = tree
        self._format = chat_format
        self._recording: set[int] = set()  # the counts at which these calls were located
        self._log: list[Segment] = list(rollout.previous.segments)
        self._replay: dict[bytes, list[RecordedCall]] = {}
        self.recorded = self._next_number = 0
        for record in map(RecordedCall.of, self._log):
            if record is not None:
                self._replay.setdefault(record.digest, []).append(record)
                self.recorded += 1
                self._next_number = max(self._next_number, record.number + 1)

    def so_far(self) -> Sample:
        """The calls so far, for the next attempt."""
        return replace(finish(self.rollout, self._log, FinishReason.ABORT, ""), session_id=self.rollout.session)

    async def answer(self, placement: Placement, times: int) -> Answer:
        """Answer a placed call that was asked `times` times before.

        Raises `CallRefused`. If the session cannot continue, `failure` then has the reason.
        """
        located, call = placement.located, placement.located.call
        try:
            room = self._room(placement)
            recorded = self._recorded_answer(placement)
            made = recorded or await self._made(placement, room, times)
            turn, stop_text = await self._read(placement, made.completion)
            turn = with_call_ids(turn, made.number)
            conversation = self._continued(placement, made.completion, turn)
        except BaseException:
            self._tree.give_up(placement)
            raise
        self.made_tokens += len(made.completion.ids)
        self.replayed += recorded is not None
        self.tools = self.tools or call.tools
        self.forced += call.tool_choice == "required"
        self.guided += call.schema is not None
        self._count_ignored(call.ignored)
        try:
            if recorded is None:
                await self._record(made, located.begun)
        finally:  # nobody has seen an answer that was not recorded
            self._tree.add(placement, conversation, made.completion, turn, number=made.number, stop_text=stop_text)
        return answer_of(made, turn, stop_text, len(placement.context), self.rollout.tokenizer)

    def is_recording(self, begun: int) -> bool:
        """Whether the answer to the call located at this count is being recorded."""
        return begun in self._recording

    def _count_ignored(self, names: Iterable[str]) -> None:
        """Count a call's ignored names. Beyond `MOST_IGNORED` names, new names are counted together as others."""
        for name in names:
            known = name in self.ignored or len(self.ignored) < MOST_IGNORED
            self.ignored[name if known else OTHERS] += 1

    def _room(self, placement: Placement) -> int:
        """The largest number of tokens in the answer. Raises `CallRefused` if there is no room."""
        rollout, conversation, call = self.rollout, placement.conversation, placement.located.call
        context, max_tokens = len(placement.context), rollout.sampling.max_tokens
        most = self._tree.most_prompt_tokens
        if placement.is_opening:
            most = rollout.max_prompt_tokens
        elif conversation.segment is not None:
            most = min(most, len(conversation.prompt_ids) + max_tokens - 1)
        if context > most:
            raise context_full(context, most)
        response_tokens = 0 if conversation.segment is None else len(conversation.segment.response_ids)
        room = min(rollout.max_prompt_tokens + max_tokens - context, max_tokens - response_tokens)
        return room if call.max_tokens is None else max(min(room, call.max_tokens), 1)

    def _recorded_answer(self, placement: Placement) -> RecordedCall | None:
        """The next recorded answer to this request, if it continues the same tokens."""
        records = self._replay.get(placement.located.digest)
        if not records:
            return None
        record = records.pop(0)
        return record if _continues(placement, record.delta) else None

    @property
    def _end_ids(self) -> frozenset[int]:
        return self.rollout.sampling.end_ids(self.rollout.tokenizer.eos_ids)

    async def _made(self, placement: Placement, room: int, times: int) -> RecordedCall:
        """The call with the model's answer, ready to be recorded."""
        rollout, located = self.rollout, placement.located
        sampling = replace(
            rollout.sampling,
            max_tokens=room,
            stop=(*rollout.sampling.stop, *located.call.stop),
            seed=call_seed(rollout.sampling, located.digest, times),
        )
        if located.call.schema is not None:
            sampling = replace(sampling, guided_json=located.call.schema, guided_regex=None)
        request = Request(placement.context, sampling, priority=rollout.priority, session=rollout.session)
        segment, reason = await self._ended(request)
        if reason is FinishReason.ERROR or not len(segment.response_ids):
            raise CallRefused("the model gave no answer", status=503, code="no_answer", retry_after_s=1)
        arrays = {name: np.asarray(array) for name, array in segment.arrays.items()}
        completion = Completion(segment.response_ids, segment.logprobs, segment.versions, reason, arrays)
        number = self._next_number
        self._next_number += 1
        return RecordedCall(number, located.digest, placement.delta, completion, int(time.time()))

    async def _ended(self, request: Request) -> tuple[Segment, FinishReason]:
        """Answer a request, and continue after each interruption unless the group is being stopped."""
        rollout, sampling = self.rollout, request.sampling
        segment: Segment | None = None
        while True:
            completion = await self._ask_engine(rest_of(request, segment))
            segment, reason = continued(request.prompt_ids, segment, completion, sampling.stop, rollout.tokenizer)
            if reason is not FinishReason.ABORT:
                return segment, reason
            if rollout.is_stopped():
                raise session_over()
            ending = spent(segment.response_ids, sampling.max_tokens, self._end_ids)
            if ending is not None:
                return segment, ending

    async def _ask_engine(self, request: Request) -> Completion:
        try:
            return await self.rollout.generate(request)
        except EngineDead as error:
            self.failure = error
            raise session_over() from error
        except ContextFull as error:
            raise CallRefused(f"prompt is too long: {error}", code=CONTEXT_FULL) from error
        except ValueError as error:
            raise CallRefused(f"the engine refused the request: {error}") from error

    async def _read(self, placement: Placement, completion: Completion) -> tuple[Turn, str | None]:
        """The parsed turn, and the stop text that ended it."""
        call, prompt = placement.located.call, placement.conversation.rendered
        tokenizer, ids = self.rollout.tokenizer, completion.ids.tolist()
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        text = tokenizer.decode(ids, special=True)
        is_cut = len(ids) == len(completion.ids) and completion.finish_reason is FinishReason.STOP
        stop_text = first_among((*self.rollout.sampling.stop, *call.stop), text) if is_cut else None
        if not call.messages:
            return Turn(text, text), stop_text
        tools = call.tools if call.tool_choice != "none" else ()
        return await self._format.parse(tokenizer, text, ids, tools, prompt), stop_text

    def _continued(self, placement: Placement, completion: Completion, turn: Turn) -> Conversation:
        """The conversation up to the answer's end. Raises `ValueError` if logprobs, versions or arrays do not cover all
        tokens."""
        conversation = placement.conversation.after_model(completion, self._end_ids)
        if not placement.located.messages:
            return conversation
        tokenizer, verbatim = self.rollout.tokenizer, self._format.verbatim
        return conversation.with_forms((verbatim_message(turn),) if verbatim else forms(turn, tokenizer))

    async def _record(self, made: RecordedCall, begun: int) -> None:
        """Keep a call in the buffer. Raises `CallRefused` if the buffer cannot keep the call: then nobody may see the
        answer."""
        self._log.append(made.segment)
        if self.rollout.record is None:
            return
        failure: Exception = RuntimeError("a call was not recorded: the lease is lost")
        self._recording.add(begun)
        try:
            if await self.rollout.record(self.so_far()):
                return
        except Exception as error:  # noqa: BLE001 - the server would take a `ConnectionError` for a client that left
            failure = error
        finally:
            self._recording.discard(begun)
        if not self.rollout.is_stopped():  # otherwise the next attempt gets this call with the others
            self.failure = self.failure or failure
        raise session_over()


def answer_of(
    made: RecordedCall, turn: Turn, stop_text: str | None, prompt_tokens: int, tokenizer: Tokenizer
) -> Answer:
    """The answer for the harness."""
    calls, reason = tuple(shown_calls(turn)), made.completion.finish_reason
    return Answer(
        number=made.number,
        content=shown_content(turn, stop_text),
        reasoning=turn.reasoning,
        calls=calls,
        finish_reason=FinishReason.TOOL_CALLS if calls and reason is FinishReason.STOP else reason,
        stop_text=stop_text,
        prompt_tokens=prompt_tokens,
        response_tokens=len(made.completion.ids),
        reasoning_tokens=len(tokenizer.encode(turn.reasoning)) if turn.reasoning else 0,
        created_s=made.created_s,
    )


def _continues(placement: Placement, delta: Int32Array) -> bool:
    """Whether a placed call ends with the recorded `delta` int32 [D], alone or after the parent's tokens. If several
    calls continue a parent, a different one may continue the parent's segment in each attempt."""
    context, parent = placement.context, placement.located.parent
    if np.array_equal(context, delta):
        return True
    before = np.zeros(0, np.int32) if parent is None else parent.conversation.context
    return np.array_equal(context, np.concatenate([before, delta]))


def with_call_ids(turn: Turn, number: int) -> Turn:
    """The turn with the caller's ids for its tool calls. Ids that the model wrote stay."""
    calls = [
        replace(call, id=call_id(number, place)) if isinstance(call, ToolCall) and call.id not in turn.text else call
        for place, call in enumerate(turn.calls)
    ]
    return replace(turn, calls=tuple(calls))


def call_seed(sampling: Sampling, digest: bytes, times: int) -> int | None:
    """One call's seed, of 63 bits, from its request and the number of earlier identical requests. The order of calls
    has no effect."""
    if sampling.seed is None:
        return None
    name = f"{sampling.seed}/{digest.hex()}/{times}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1
