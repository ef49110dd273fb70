"""A simulated engine that asks for products, one a turn, and notes each turn that it makes in a file."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rollq.buffer.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.protocol import Completion, EngineDead, Request
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, call

CALLS = 12
LAST = "It is 42"


def words(turn: int) -> str:
    """The words of the model at a turn, counted from 0: `CALLS` in all."""
    return LAST if turn == CALLS - 1 else call("calculator", expression=f"{turn}*7")


class CallingEngine(SimulatedEngine):
    """Says `words`, in a conversation of the template `PLAIN`; nothing from turn `silent` on. It dies at each turn in
    `dies`, once. Each turn has `array_bytes` more, of each of its tokens."""

    def __init__(
        self, model: str, notes: str, silent: int = CALLS, dies: Sequence[int] = (), array_bytes: int = 0
    ) -> None:
        super().__init__(SimulatedSettings())
        self._dies = dies
        self._tokenizer = HfTokenizer(Path(model))
        self._notes = Path(notes)
        self._silent = silent
        self._array_bytes = array_bytes

    async def generate(self, request: Request) -> Completion:
        turn = self._tokenizer.decode(request.prompt_ids.tolist()).count("assistant: ") - 1
        if turn >= self._silent:
            await asyncio.Event().wait()
        died = self._notes.with_suffix(f".died-{turn}")
        if turn in self._dies and not died.exists():
            died.touch()
            raise EngineDead(f"at turn {turn}")
        with self._notes.open("a") as notes:
            notes.write(f"{turn}\n")
        ids = np.array([*self._tokenizer.encode(words(turn)), EOS], np.int32)
        logprobs = np.full(len(ids), -(turn + 1) / 16, np.float32)
        spans = (VersionSpan(self.version.epoch, self.version.version, len(ids)),)
        noise = np.random.default_rng(turn).bytes(len(ids) * self._array_bytes)
        arrays = {"noise": np.frombuffer(noise, np.uint8).reshape(len(ids), -1)} if noise else {}
        return Completion(ids, logprobs, spans, FinishReason.STOP, arrays)
