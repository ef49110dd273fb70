"""A Hugging Face causal LM in this process, on the CPU or one GPU, with continuous batching.

The event loop decides (who joins, who leaves, when weights are swapped), one thread computes, and they take turns: the
batch needs no lock, and the event loop never waits for a forward pass. Invariant: weights change only between two
decode steps.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from rollq.buffer.errors import ConfigError
from rollq.buffer.rollouts import FinishReason
from rollq.buffer.settings import Settings
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.protocol import Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.transformers.decode_batch import ActiveSequence, DecodeBatch
from rollq.workers.engines.transformers.weights import copy_weights, read_weights
from rollq.workers.tokenizers.hugging_face import HfTokenizer, model_eos_ids

log = logging.getLogger(__name__)

T = TypeVar("T")


class TransformersSettings(Settings):
    """Which model serves, and where."""

    model: Path = Field(description="folder written by save_pretrained")
    device: str = Field(default="auto", description="auto (cuda if there is one), cpu, cuda, cuda:1, ...")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_batch: int = Field(default=512, gt=0, description="sequences decoded together")


@dataclass(slots=True, eq=False)
class _Job:
    """A request and where its completion goes. A cancelled `done` means that nobody waits for it any more."""

    sequence: ActiveSequence
    request: Request
    done: asyncio.Future[Completion]


@dataclass(frozen=True, slots=True, eq=False)
class _Swap:
    """Checked weights that wait for their moment."""

    weights: dict[str, torch.Tensor]
    version: WeightsVersion
    mode: SwapMode
    done: asyncio.Future[float]


class TransformersEngine:
    """`Engine` over a causal LM with full attention. Requests join the running batch after its current step."""

    def __init__(self, settings: TransformersSettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollq-engine")
        self._waiting: list[_Job] = []
        self._aborting: set[Request] = set()
        self._asleep = False
        self._running: dict[ActiveSequence, _Job] = {}
        self._swap: _Swap | None = None
        self._swap_lock = asyncio.Lock()
        self._work = asyncio.Event()
        self._driver: asyncio.Task[None] | None = None
        self._dead: str | None = "is not started"

    async def start(self) -> None:
        """Load the model. Raises `ConfigError` when the folder holds none or the device is not there."""
        self._model = await self._compute(self._load)
        self._device: torch.device = self._model.device
        self._batch = DecodeBatch(
            self._model, model_eos_ids(self._settings.model), lambda ids: self._tokenizer.decode(ids)
        )
        self._dead = None
        self._driver = asyncio.create_task(self._drive(), name="rollq-engine")

    async def generate(self, request: Request) -> Completion:
        """Generate one sequence; see `Engine.generate`."""
        self._check_alive()
        job = _Job(self._sequence(request), request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._work.set()
        try:
            return await job.done
        finally:
            self._work.set()  # a cancelled request leaves at once, also when nothing else is to do

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Serve other weights; see `Engine.swap`. The file is read while generation goes on."""
        async with self._swap_lock:
            self._check_alive()
            checked = await asyncio.to_thread(read_weights, weights, self._model)
            self._check_alive()
            self._swap = _Swap(checked, version, mode, asyncio.get_running_loop().create_future())
            self._work.set()
            return await self._swap.done

    async def abort(self, requests: Collection[Request]) -> None:
        """End requests after the current step; see `Engine.abort`."""
        self._aborting.update(requests)
        self._work.set()

    async def sleep(self) -> None:
        """Free the cache and, on a GPU, move the weights to the host's memory; see `Engine.sleep`."""
        self._check_alive()
        self._asleep = True
        jobs = list(self._running.values())
        await self.abort([job.request for job in jobs])
        await asyncio.gather(*(job.done for job in jobs), return_exceptions=True)
        self._check_alive()
        await self._compute(self._move, torch.device("cpu"))

    async def wake(self) -> None:
        """Move the weights back and serve; see `Engine.wake`."""
        self._check_alive()
        await self._compute(self._move, self._device)
        self._asleep = False
        self._work.set()

    async def close(self) -> None:
        """Stop after the current step; running requests end with `EngineDead`."""
        self._dead = self._dead or "is closed"
        self._work.set()
        if self._driver is not None:
            await self._driver
        self._thread.shutdown()

    # -- the driver: one task of the event loop -----------------------------------------------------------------

    async def _drive(self) -> None:
        """Decode for as long as the engine lives."""
        try:
            while self._dead is None:
                await self._advance()
        except Exception as error:  # whatever breaks a step breaks the engine, and every request must hear of it
            log.exception("the engine died")
            self._dead = f"died: {error!r}"
        finally:
            self._dead = self._dead or "is closed"
            self._fail_all()

    async def _advance(self) -> None:
        """One turn: drop who is not wanted any more, swap if it is time, admit, decode a step, answer the finished."""
        self._work.clear()  # first: what arrives during this turn starts another
        aborted, self._aborting = self._aborting, set()
        self._end(job for job in [*self._waiting, *self._running.values()] if job.request in aborted)
        if self._swap is not None and self._may_swap(self._swap):
            await self._apply_swap(self._swap)
        if self._swap is not None and self._swap.done.done():
            self._swap = None
        joining = self._take_waiting()
        if not self._running:
            await self._work.wait()
            return
        for sequence in await self._compute(self._step, joining):
            self._answer(self._running.pop(sequence), sequence.finish_reason or FinishReason.ERROR)

    def _take_waiting(self) -> list[ActiveSequence]:
        """Move waiting requests into the batch, as far as there is room; none while a swap waits for the others."""
        if self._swap is not None or self._asleep:
            return []
        self._waiting.sort(key=lambda job: job.request.priority)
        room = self._settings.max_batch - len(self._running)
        jobs, self._waiting = self._waiting[:room], self._waiting[room:]
        for job in jobs:
            job.sequence.versions.append((self.version, 0))
            self._running[job.sequence] = job
        return [job.sequence for job in jobs]

    def _end(self, aborted: Iterable[_Job]) -> None:
        """Answer requests with what they have, and drop all that nobody waits for any more."""
        for job in aborted:
            self._answer(job, FinishReason.ABORT)
        ended = [sequence for sequence, job in self._running.items() if job.done.done()]
        for sequence in ended:
            del self._running[sequence]
        self._waiting = [job for job in self._waiting if not job.done.done()]
        self._batch.remove(ended)

    def _may_swap(self, swap: _Swap) -> bool:
        """Whether nothing runs that the swap waits for. Ends what it does not wait for and may not outlive it."""
        if swap.done.done():
            return True
        if swap.mode is SwapMode.WAIT:
            return not self._running
        if swap.mode is SwapMode.ABORT:
            self._end(job for job in list(self._running.values()) if not job.request.must_finish)
        return not any(job.request.must_finish for job in self._running.values())

    async def _apply_swap(self, swap: _Swap) -> None:
        """Change the weights between two steps, unless nobody waits for it any more."""
        if swap.done.done():
            return
        started_s = monotonic()
        await self._compute(self._replace_weights, swap)
        self.version = swap.version
        if not swap.done.done():
            swap.done.set_result(monotonic() - started_s)

    def _answer(self, job: _Job, finish_reason: FinishReason) -> None:
        if not job.done.done():
            job.done.set_result(job.sequence.completion(finish_reason))

    def _fail_all(self) -> None:
        """Tell everybody who waits that the engine is gone."""
        waiting: list[asyncio.Future[Any]] = [job.done for job in [*self._waiting, *self._running.values()]]
        if self._swap is not None:
            waiting.append(self._swap.done)
        for done in waiting:
            if not done.done():
                done.set_exception(EngineDead(f"the engine {self._dead}"))
        self._waiting.clear()
        self._running.clear()

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(f"the engine {self._dead}")

    def _sequence(self, request: Request) -> ActiveSequence:
        """The request, checked, as a sequence. Raises `ValueError`."""
        config = self._model.config.get_text_config()
        limit = token_limit(request, config.max_position_embeddings)
        prefix = [] if request.prefix_ids is None else request.prefix_ids.tolist()
        context = request.prompt_ids.tolist() + prefix
        if min(context) < 0 or max(context) >= config.vocab_size:
            raise ValueError(f"token ids must be in [0, {config.vocab_size}), found {min(context)} to {max(context)}")
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        return ActiveSequence(context, len(prefix), request.sampling, seed, limit, versions=[])

    # -- what runs in the engine's thread -----------------------------------------------------------------------

    async def _compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run `function` in the engine's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _load(self) -> Any:
        device = self._settings.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        transformers_logging.disable_progress_bar()
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                self._settings.model, dtype=getattr(torch, self._settings.dtype), local_files_only=True
            )
            return model.to(device).eval().requires_grad_(False)
        except (OSError, ValueError, RuntimeError, AssertionError) as error:  # torch asserts that it has CUDA
            raise ConfigError(f"cannot load model {str(self._settings.model)!r} on {device!r}: {error}") from error

    def _step(self, joining: list[ActiveSequence]) -> list[ActiveSequence]:
        self._batch.add(joining)
        return self._batch.step()

    def _replace_weights(self, swap: _Swap) -> None:
        copy_weights(swap.weights, self._model)
        self._batch.recompute(swap.version)

    def _move(self, device: torch.device) -> None:
        """Have the weights on `device`, and give the memory that others held back to the GPU."""
        self._model.to(device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        """Only stop strings need it."""
        return HfTokenizer(self._settings.model)
