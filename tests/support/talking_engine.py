"""A simulated engine that calls tools, and stops answering at a turn when a test says so."""

import asyncio
from pathlib import Path

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, call

TURNS = (*(call("calculator", expression=f"{number}*7") for number in range(4)), "It is 42")


class TalkingEngine(SimulatedEngine):
    """Says `TURNS`, one after the other, in a conversation of the template `PLAIN`; nothing from turn `silent` on."""

    def __init__(self, model: str, silent: int) -> None:
        super().__init__(SimulatedSettings())
        self._tokenizer = HfTokenizer(Path(model))
        self._silent = silent

    async def generate(self, request: Request) -> Completion:
        turn = self._tokenizer.decode(request.prompt_ids.tolist()).count("assistant: ") - 1
        if turn >= self._silent:
            await asyncio.Event().wait()
        ids = np.array([*self._tokenizer.encode(TURNS[turn]), EOS], np.int32)
        logprobs = np.full(len(ids), -(turn + 1) / 4, np.float32)
        spans = (VersionSpan(self.version.epoch, self.version.version, len(ids)),)
        return Completion(ids, logprobs, spans, FinishReason.STOP)
