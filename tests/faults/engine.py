"""A simulated engine whose tokens are random, so that two attempts never look alike, and which some prompts kill."""

import os
import random
import signal
from typing import Any

import numpy as np

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings

POISON = b"poison"


class ChaosEngine(SimulatedEngine):
    """`SimulatedEngine` with random tokens. A prompt that contains `poison` ends the worker's process by SIGKILL."""

    def __init__(self, **options: Any) -> None:
        super().__init__(SimulatedSettings(**options))
        self._random = random.Random(os.urandom(8))

    async def generate(self, request: Request) -> Completion:
        """As `SimulatedEngine.generate`, with random tokens."""
        if POISON in bytes(request.prompt_ids.astype(np.uint8)):
            os.kill(os.getpid(), signal.SIGKILL)
        made = await super().generate(request)
        last = made.ids[-1:] if made.finish_reason is FinishReason.STOP else made.ids[:0]
        drawn = [self._random.randrange(32, 127) for _ in range(len(made.ids) - len(last))]
        ids = np.concatenate([np.array(drawn, dtype=np.int32), last])
        return Completion(ids, made.logprobs, made.versions, made.finish_reason)
