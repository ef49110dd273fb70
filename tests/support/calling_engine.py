"""An engine whose model is a process of its own, as vLLM's is: a test can kill it. It asks for products, one a turn.

The process notes each turn that it makes in a file. Whenever it makes a turn again, the answer is another one.
"""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from rollq.buffer.values.rollouts import FinishReason, VersionSpan
from rollq.workers.engines.protocol import Completion, EngineDead, Request
from rollq.workers.engines.simulated import SimulatedEngine, SimulatedSettings
from rollq.workers.tokenizers.hugging_face import HfTokenizer
from support.chat_engine import EOS, call

ENGINE = "support.calling_engine.CallingEngine"
CALLS = 12
MODEL = """
import sys
for turn in sys.stdin:
    with open(sys.argv[1], "a+") as notes:
        notes.seek(0)
        times = notes.readlines().count(turn)
        notes.write(turn)
    print(times, flush=True)
"""


def words(turn: int, times: int) -> str:
    """The words of the model at a turn, counted from 0: `CALLS` in all. It was made `times` times before."""
    return f"It is {times}" if turn == CALLS - 1 else call("calculator", expression=f"{turn}*{times}")


class CallingEngine(SimulatedEngine):
    """Says `words`, in a conversation of the template `PLAIN`; nothing from turn `silent` on. Each turn has
    `array_bytes` more, of each of its tokens. The pid of its process is in `notes` + ".pid"."""

    def __init__(self, model: str, notes: str, silent: int = CALLS, array_bytes: int = 0) -> None:
        super().__init__(SimulatedSettings())
        self._tokenizer = HfTokenizer(Path(model))
        self._notes = Path(notes)
        self._silent = silent
        self._array_bytes = array_bytes
        self._asking = asyncio.Lock()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", MODEL, str(self._notes),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._notes.with_suffix(".pid").write_text(str(self._process.pid))
        await super().start()

    async def generate(self, request: Request) -> Completion:
        turn = self._tokenizer.decode(request.prompt_ids.tolist()).count("assistant: ") - 1
        if turn >= self._silent:
            await asyncio.Event().wait()
        async with self._asking:
            times = await self._ask(turn)
        ids = np.array([*self._tokenizer.encode(words(turn, times)), EOS], np.int32)
        logprobs = np.full(len(ids), -(turn + 1) / 16, np.float32)
        spans = (VersionSpan(self.version.epoch, self.version.version, len(ids)),)
        noise = np.random.default_rng(turn).bytes(len(ids) * self._array_bytes)
        arrays = {"noise": np.frombuffer(noise, np.uint8).reshape(len(ids), -1)} if noise else {}
        return Completion(ids, logprobs, spans, FinishReason.STOP, arrays)

    async def _ask(self, turn: int) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(ConnectionError):
            self._process.stdin.write(b"%d\n" % turn)
            await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        if not answer:
            raise EngineDead("its process has died")
        return int(answer)

    async def close(self) -> None:
        await super().close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
