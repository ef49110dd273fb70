"""A simulated engine whose tokens differ, and that stops making them when a test says so."""

import asyncio

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, Float32Array, Int32Array
from rollq.workers.engines.protocol import Completion
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings, _Call
from rollq.workers.tokenizers.byte import EOS_ID

SPEED = 20_000.0


class StepEngine(SimulatedEngine):
    """Makes answers of `length` tokens. Token i of an answer is always the same; none after `stall_at` is made."""

    def __init__(self, length: int, stall_at: int) -> None:
        super().__init__(SimulatedSettings(lengths=(length,), tokens_per_s=SPEED))
        self._stall_at = stall_at

    async def _until(self, call: _Call, tokens: int) -> None:
        if before(call) + tokens > self._stall_at:
            await asyncio.Event().wait()
        await super()._until(call, tokens)

    def _complete(self, call: _Call, tokens: int, finish_reason: FinishReason) -> Completion:
        completion = super()._complete(call, tokens, finish_reason)
        ids, logprobs = answer(before(call) + tokens)
        ids, logprobs = ids[before(call) :], logprobs[before(call) :]
        if finish_reason is FinishReason.STOP:
            ids[-1] = EOS_ID
        return Completion(ids, logprobs, completion.versions, finish_reason)


def answer(tokens: int) -> tuple[Int32Array, Float32Array]:
    """The first tokens of every answer, and their logprobs."""
    positions = np.arange(tokens)
    return (positions % 199 + 2).astype(np.int32), (-(positions + 1) / 10_000).astype(np.float32)


def before(call: _Call) -> int:
    """Tokens of the answer that earlier attempts have made."""
    return 0 if call.request.prefix_ids is None else len(call.request.prefix_ids)
