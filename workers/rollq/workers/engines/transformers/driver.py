"""Drives a running batch: one task on the event loop decodes step after step.

The event loop decides (who joins, who leaves, when weights are swapped), one thread computes, and they take turns: the
batch needs no lock, and the event loop never waits for a forward pass. Invariant: weights change only between two
decode steps, and a sequence joins only while the gate is open.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

import torch

from rollq.buffer.values.rollouts import FinishReason
from rollq.workers.engines.gate import Call, RequestGate
from rollq.workers.engines.protocol import REPORT_TOKENS, Completion, EngineDead, WeightsVersion
from rollq.workers.engines.transformers.decode_batch import ActiveSequence, DecodeBatch
from rollq.workers.engines.transformers.weights import copy_weights

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Job(Call):
    """A request as a sequence in the batch. If `done` is cancelled, nobody waits for the request."""

    sequence: ActiveSequence = field(kw_only=True)
    done: "asyncio.Future[Completion]" = field(init=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Swap:
    """Checked weights to apply before the next step. Cancelling `done` withdraws them."""

    weights: dict[str, torch.Tensor]
    version: WeightsVersion
    done: "asyncio.Future[float]"


class DecodeDriver:
    """Decodes jobs together, at most `max_batch` at a time; the lowest priority number goes first."""

    def __init__(self, gate: RequestGate[Job], max_batch: int) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._gate = gate
        self._max_batch = max_batch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollq-engine")
        self._waiting: list[Job] = []
        self._running: dict[ActiveSequence, Job] = {}
        self._stopping: list[Job] = []
        self._swap: _Swap | None = None
        self._closing = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, model: Any, batch: DecodeBatch) -> None:
        """Decode with `batch` until `close`."""
        self._model, self._batch = model, batch
        self._task = asyncio.create_task(self._run(), name="rollq-engine")

    async def decode(self, job: Job) -> Completion:
        """Let a job join the running batch after the current step, and return its completion."""
        job.done = asyncio.get_running_loop().create_future()
        self._waiting.append(job)
        self._work.set()
        try:
            return await job.done
        finally:
            self._work.set()  # a cancelled job leaves immediately, even when there is nothing else to do

    def wake(self) -> None:
        """Look for work again after the gate has opened."""
        self._work.set()

    async def stop(self, jobs: Sequence[Job]) -> None:
        """End running jobs after the current step. The jobs keep their tokens so far."""
        self._stopping += jobs
        self._work.set()
        await asyncio.wait([job.answer for job in jobs])

    async def swap(self, weights: dict[str, torch.Tensor], version: WeightsVersion) -> float:
        """Change the weights between two steps. Returns the duration in seconds. Raises `EngineDead`."""
        self._swap = _Swap(weights, version, asyncio.get_running_loop().create_future())
        self._work.set()
        return await self._swap.done

    async def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        """Stop after the current step."""
        self._closing = True
        self._work.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        try:
            while not self._closing:
                await self._advance()
        except Exception as error:  # an error in a step breaks the engine and ends every request
            log.exception("the engine died")
            self._gate.fail(f"the engine died: {error!r}")
        finally:
            if self._swap is not None and not self._swap.done.done():
                self._swap.done.set_exception(EngineDead("the engine ended before it took the weights"))

    async def _advance(self) -> None:
        """One turn: end stopped jobs, swap, let jobs join, decode a step, answer the finished jobs."""
        self._work.clear()  # cleared first: work that arrives during this turn starts another turn
        stopping, self._stopping = self._stopping, []
        self._end(stopping)
        if (swap := self._swap) is not None:
            await self._apply(swap)
            if self._swap is swap:  # after a cancellation, the next swap may have arrived
                self._swap = None
        joining = self._take_waiting()
        if not self._running:
            await self._work.wait()
            return
        for sequence in await self.compute(self._step, joining):
            _answer(self._running.pop(sequence), sequence.finish_reason or FinishReason.ERROR)
        for sequence, job in self._running.items():
            if job.request.report is not None and len(sequence.ids) % REPORT_TOKENS == 0:
                job.request.report(sequence.completion(FinishReason.ABORT))

    def _take_waiting(self) -> list[ActiveSequence]:
        """Move waiting jobs into the batch while there is room, unless the gate is closed."""
        if not self._gate.is_open:
            return []
        self._waiting.sort(key=lambda job: job.request.priority)
        room = self._max_batch - len(self._running)
        jobs, self._waiting = self._waiting[:room], self._waiting[room:]
        for job in jobs:
            job.version = self.version
            job.sequence.versions.append((self.version, 0))
            self._running[job.sequence] = job
        return [job.sequence for job in jobs]

    def _end(self, stopping: Iterable[Job]) -> None:
        """Return the tokens of ending jobs, and drop jobs that nobody waits for."""
        for job in stopping:
            _answer(job, FinishReason.ABORT)
        ended = [sequence for sequence, job in self._running.items() if job.done.done()]
        for sequence in ended:
            del self._running[sequence]
        self._waiting = [job for job in self._waiting if not job.done.done()]
        self._batch.remove(ended)

    async def _apply(self, swap: _Swap) -> None:
        if swap.done.done():
            return
        started_s = monotonic()
        await self.compute(self._replace_weights, swap)
        self.version = swap.version
        if not swap.done.done():
            swap.done.set_result(monotonic() - started_s)

    # -- in the engine's thread

    def _step(self, joining: list[ActiveSequence]) -> list[ActiveSequence]:
        self._batch.add(joining)
        return self._batch.step()

    def _replace_weights(self, swap: _Swap) -> None:
        copy_weights(swap.weights, self._model)
        self._batch.recompute(swap.version)


def _answer(job: Job, finish_reason: FinishReason) -> None:
    if not job.done.done():
        job.done.set_result(job.sequence.completion(finish_reason))
