"""A simulated engine that writes as GPT-OSS does: two turns with a call, and an answer."""

from pathlib import Path

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.protocol import Completion, Request
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_families import BUILT_IN
from support.chat_round_trip import tool_turns


class HarmonyEngine(SimulatedEngine):
    """Takes the turn after those that are in its prompt."""

    def __init__(self, model: str) -> None:
        super().__init__(SimulatedSettings())
        self._tokenizer = HfTokenizer(Path(model))

    async def generate(self, request: Request) -> Completion:
        family = BUILT_IN["GPT-OSS"]
        turn = self._tokenizer.decode(request.prompt_ids.tolist(), special=True).count("to=assistant")
        text, calls = tool_turns(family)[turn]
        ids = np.array(self._tokenizer.encode(text + ((family.call_end or "") if calls else family.end)), np.int32)
        spans = (VersionSpan(self.version.epoch, self.version.version, len(ids)),)
        return Completion(ids, np.full(len(ids), -0.5, np.float32), spans, FinishReason.STOP)
