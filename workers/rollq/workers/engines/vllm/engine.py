"""vLLM in this worker's process (`AsyncLLM`). With `vllm_api` all that knows vLLM; versions 0.30 to 0.33.

Invariant: a request reaches vLLM only while no swap is under way, and vLLM sees a swap as pause, load, name the
version, resume. So every token is of the weights that vLLM's own version span tells, and running requests, which lose
their cache at the pause, go on from keys and values of the new weights.

Weights are checked before vLLM hears of them: a load that fails half-way kills vLLM at its next step, and tensors that
are missing raise nothing there.
"""

import asyncio
import logging
import signal
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import resource_tracker
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
from pydantic import Field, field_validator
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.rollouts import FinishReason
from rollq.buffer.settings import Settings
from rollq.workers.engines.limits import token_limit
from rollq.workers.engines.protocol import Completion, EngineDead, Request, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import Incoming
from rollq.workers.engines.tensors import check_tensors, is_adapter, tensor_shapes, tied_heads
from rollq.workers.engines.vllm.api import name_of, read_output, sampling_parameters
from rollq.workers.engines.vllm.extension import LoadExtension
from rollq.workers.tokenizers.hugging_face import CONFIG_FILE, model_eos_ids

log = logging.getLogger(__name__)

ENDS_WITHIN_S = 1.0
"""An aborted request that vLLM had not registered yet is not heard of again; after so long it is cancelled."""
NOT_YOURS = {
    "model": "set [worker.options] model",
    "tokenizer": "it is the model's",
    "skip_tokenizer_init": "an id outside the vocabulary would kill the engine",
    "dtype": "set [worker.options] dtype",
    "load_format": "weights are loaded from the model's folder",
    "logprobs_mode": "training needs the logprobs of what was sampled",
    "generation_config": "every sampling parameter is sent with each request",
    "scheduling_policy": "evaluations overtake training",
    "worker_extension_cls": "it loads weights",
}
"""Arguments of vLLM that rollq sets itself, and why."""
ON_CPU = {"enable_chunked_prefill": False}
"""Until vLLM 0.33, half a prompt in a step kills the engine on the CPU when its request has a seed."""
TELLS_VERSIONS = "weight_versions" in CompletionOutput.__dataclass_fields__
"""Whether this vLLM says which weights made which token; since 0.32."""
LEAVES_GROUPS = hasattr(AsyncLLM, "shutdown_weight_transfer_engine")
"""Whether this vLLM frees a group that it met a trainer in; since 0.32."""


class VllmSettings(Settings):
    """Which model vLLM serves, and how."""

    model: Path = Field(description="folder written by save_pretrained")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(default="auto", description="auto: the model's")
    recompute_cache: bool = Field(
        default=True, description="false: after a swap, running requests go on from keys and values of the old weights"
    )
    engine_args: dict[str, Any] = Field(default_factory=dict, description="more arguments of vLLM's AsyncEngineArgs")

    @field_validator("engine_args")
    @classmethod
    def _leave_ours_alone(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in NOT_YOURS.keys() & given.keys():
            raise ValueError(f"{name!r} is set by rollq: {NOT_YOURS[name]}")
        return given


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way through vLLM; `begun` when it is there and no longer waits for a swap or a sleep to end;
    `adapter` then makes its tokens, if it is not the model alone."""

    request: Request
    name: str
    begun: bool = False
    adapter: LoRARequest | None = None
    answer: asyncio.Future[Completion] = field(init=False)


class VllmEngine:
    """`Engine` over `AsyncLLM`. A group is as many requests as it has samples; they share the prompt's cache."""

    def __init__(self, settings: VllmSettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self._settings = settings
        self._vllm: Any = None
        self._names = count()
        self._calls: set[_Call] = set()
        self._adapter: LoRARequest | None = None
        self._loaded: set[int] = set()
        self._open = asyncio.Event()
        self._swap_lock = asyncio.Lock()
        self._asleep = False
        self._dead: str | None = "is not started"

    async def start(self) -> None:
        """Load the model; takes seconds to minutes. Raises `ConfigError` when vLLM cannot serve it."""
        if "weight_transfer_config" in self._settings.engine_args and not LEAVES_GROUPS:
            raise ConfigError("engine_args: this vLLM cannot meet a trainer again and again, 0.32 and later can")
        folder = self._settings.model
        if not (folder / CONFIG_FILE).exists():
            raise ConfigError(
                f"cannot load model {str(folder)!r}: it holds no {CONFIG_FILE}; give a folder with a model"
            )
        try:
            self._tensors = tensor_shapes(folder)
        except WeightsError as error:
            raise ConfigError(f"cannot load model {str(folder)!r}: {error}") from error
        self._vllm = await asyncio.to_thread(self._load)
        self._vllm._run_output_handler()  # it hears of the process's end; vLLM would begin it with the first request
        config = self._vllm.vllm_config.model_config
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        self._copies = tied_heads(self._tensors) if tied else {}
        self._context_tokens = int(config.max_model_len)
        self._vocabulary = int(config.get_vocab_size())
        self._stop_ids = sorted(model_eos_ids(folder))
        self._dead = None
        await self._name_version(self.version)
        self._open.set()

    def _load(self) -> AsyncLLM:
        """vLLM with the model. It tells the reason of a failure in its log, not in the error."""
        model = str(self._settings.model)
        ours = {
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "scheduling_policy": "priority",
            "worker_extension_cls": f"{LoadExtension.__module__}.{LoadExtension.__qualname__}",
        }
        given = {**(ON_CPU if current_platform.is_cpu() else {}), **self._settings.engine_args}
        args = {"disable_log_stats": True, "dtype": self._settings.dtype, **given, **ours}
        # Ctrl-C on a terminal is for the worker, whose groups may still finish: the processes that this thread starts
        # do not see it. Starting multiprocessing's own helper would lift the block.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **args))
        except (TypeError, ValueError, RuntimeError, OSError, NotImplementedError, AssertionError) as error:
            raise ConfigError(f"vLLM cannot serve model {model!r} with {args!r}: {error}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    async def generate(self, request: Request) -> Completion:
        """Generate one sequence; see `Engine.generate`."""
        self._check_alive()
        tokens = token_limit(request, self._context_tokens)
        prefix = [] if request.prefix_ids is None else request.prefix_ids.tolist()
        ids = request.prompt_ids.tolist() + prefix
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ValueError(f"token ids must be in [0, {self._vocabulary}), found {min(ids)} to {max(ids)}")
        call = _Call(request, f"rollq-{next(self._names)}")
        call.answer = asyncio.ensure_future(self._serve(call, ids, tokens))
        self._calls.add(call)
        try:
            await asyncio.wait([call.answer])
        finally:
            call.answer.cancel()
            self._calls.discard(call)
        if call.answer.cancelled():
            self._check_alive()
            return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)
        return call.answer.result()

    async def _serve(self, call: _Call, ids: list[int], tokens: int) -> Completion:
        """Ask vLLM as soon as no swap is under way."""
        while not self._open.is_set():
            await self._open.wait()
        self._check_alive()
        version, adapter = self.version, self._adapter
        call.begun, call.adapter = True, adapter
        parameters = sampling_parameters(call.request.sampling, tokens, self._stop_ids)
        # The salt keeps cached prompts of other weights away, also where running requests keep theirs.
        prompt = tokens_input(ids, cache_salt=name_of(version))
        answers = self._vllm.generate(
            prompt, parameters, call.name, lora_request=adapter, priority=call.request.priority
        )
        try:
            outputs = [output async for output in answers]  # one: the final one
        except EngineDeadError as error:
            raise self._died(f"vLLM died: {error}") from error
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses the request: {error}") from error
        return read_output(outputs[-1].outputs[0], version, spans=adapter is None)

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Serve other weights, or an adapter; see `Engine.swap`. New requests wait as long as it takes.

        Raises `ConfigError` for `keep` with a vLLM that does not tell which weights made which token.
        """
        async with self._swap_lock:
            self._check_swap(mode)
            adapter = is_adapter(weights)
            if not adapter:
                await self._check(weights)
            self._open.clear()
            try:
                await self._drain(mode, adapter=adapter)
                if adapter:
                    await self._load_adapter(weights, version)
                    return 0.0
                await self._check(weights)  # again: what was waited for took its time, and folders come and go
                return await self._change_weights(version, "rollq_load", str(weights), self._copies)
            finally:
                if not self._asleep:
                    self._open.set()

    @property
    def transfer_ranks(self) -> int:
        """One a GPU, when vLLM was started to take weights from a trainer; see `Receiver`."""
        if self._vllm is None or (config := self._vllm.vllm_config).weight_transfer_config is None:
            return 0
        return int(config.parallel_config.world_size_across_dp)

    async def receive(self, incoming: Incoming, version: WeightsVersion, mode: SwapMode) -> float:
        """Take weights from the trainer by vLLM's weight transfer; see `Receiver.receive`.

        Raises `ConfigError` as `swap` does.
        """
        async with self._swap_lock:
            self._check_swap(mode)
            where = f"round {incoming.number}"
            check_tensors(incoming.shapes, self._tensors, where, optional=self._copies.values())
            self._open.clear()
            try:
                await self._drain(mode, adapter=False)
                drained_s = monotonic()
                plan = await incoming.join(self.transfer_ranks)
                waited_s = 0.0 if mode is SwapMode.KEEP else monotonic() - drained_s
                change = self._change_weights(version, "rollq_receive", plan.init_info, plan.update_info)
                return waited_s + await change
            finally:
                if not self._asleep:
                    self._open.set()

    def _check_swap(self, mode: SwapMode) -> None:
        self._check_alive()
        if mode is SwapMode.KEEP and not TELLS_VERSIONS:
            raise ConfigError(
                "this vLLM does not tell which weights made which token, 0.32 and later do: "
                "set [worker] swap = 'wait' or 'abort'"
            )

    async def _check(self, folder: Path) -> None:
        """Raise `WeightsError` unless the folder holds the tensors of this model."""
        found = await asyncio.to_thread(tensor_shapes, folder)
        check_tensors(found, self._tensors, str(folder), optional=self._copies.values())

    async def _drain(self, mode: SwapMode, *, adapter: bool) -> None:
        """Let the requests end that a swap waits for, and abort those that may not outlive it.

        On the CPU, vLLM gives requests without an adapter the one in its last place when they share a step with others.
        """
        begun = [call for call in self._calls if call.begun]
        if mode is SwapMode.ABORT:
            await self.abort([call.request for call in begun if not call.request.must_finish])
        used = sorted(self._used_adapters())  # the oldest first
        ending = used[: max(len(used) - self._spared_adapters(adapter), 0)]
        holding = [
            call.answer
            for call in begun
            if mode is SwapMode.WAIT
            or call.request.must_finish
            or (call.adapter is not None and call.adapter.lora_int_id in ending)
            or (call.adapter is None and adapter and current_platform.is_cpu())
        ]
        if holding:
            await asyncio.wait(holding)
        self._check_alive()

    def _spared_adapters(self, adapter: bool) -> int:
        """How many adapters may go on through a swap, to an adapter or not. None when the weights below them change:
        their tokens carry the adapter's version alone. Else those that vLLM has room for beside one more: it loads what
        it dropped from its folder again, and dies when that is gone."""
        lora = self._vllm.vllm_config.lora_config
        return lora.max_loras - 1 if adapter and lora is not None else 0

    def _used_adapters(self) -> set[int]:
        """vLLM's numbers of the adapters that running requests use; they grow."""
        return {call.adapter.lora_int_id for call in self._calls if call.adapter and not call.answer.done()}

    async def _change_weights(self, version: WeightsVersion, load: str, *args: Any) -> float:
        """Call `load` of the extension between two steps of vLLM; returns the seconds between them."""
        started_s = monotonic()
        await self._ask(self._vllm.pause_generation(mode="keep", clear_cache=self._settings.recompute_cache))
        await self._ask(self._vllm.collective_rpc(load, args=args))
        await self._name_version(version)
        await self._ask(self._vllm.resume_generation())
        self.version, self._adapter = version, None
        return monotonic() - started_s

    async def _load_adapter(self, folder: Path, version: WeightsVersion) -> None:
        """Serve new requests with an adapter; running ones finish on theirs."""
        adapter = LoRARequest(name_of(version), next(self._names) + 1, str(folder))
        used = self._used_adapters()
        for unused in self._loaded - used:  # so that vLLM, which drops what was used longest ago, drops none of those
            await self._ask(self._vllm.remove_lora(unused))
        self._loaded = used
        try:
            added = await self._unless_dead(self._vllm.add_lora(adapter))
        except EngineDeadError as error:
            raise self._died(f"vLLM died as it loaded adapter {str(folder)!r}: {error}") from error
        except Exception as error:
            raise WeightsError(f"vLLM refuses adapter {str(folder)!r}: {error}") from error
        if not added:
            raise WeightsError(f"vLLM refuses adapter {str(folder)!r}")
        self.version, self._adapter = version, adapter
        self._loaded.add(adapter.lora_int_id)

    async def _name_version(self, version: WeightsVersion) -> None:
        if TELLS_VERSIONS:
            await self._ask(self._vllm.update_weight_version(name_of(version)))

    async def _ask(self, answer: Any) -> Any:
        """Await what changes the whole of vLLM. Half done it is of no use any more."""
        try:
            return await self._unless_dead(answer)
        except Exception as error:
            raise self._died(f"vLLM broke: {type(error).__name__}: {error}") from error

    async def _unless_dead(self, answer: Any) -> Any:
        """vLLM's answer to a call of no request. When its process ends meanwhile, vLLM tells only the requests."""
        asking = asyncio.ensure_future(answer)
        try:
            await asyncio.wait([asking, self._vllm.output_handler], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EngineDeadError
            return asking.result()
        finally:
            asking.cancel()

    async def abort(self, requests: Collection[Request]) -> None:
        """End requests with what they have; see `Engine.abort`."""
        wanted = set(requests)
        calls = [call for call in self._calls if call.request in wanted]
        begun = [call for call in calls if call.begun]
        if begun and self._dead is None:
            await self._ask(self._vllm.abort([call.name for call in begun]))
            await asyncio.wait([call.answer for call in begun], timeout=ENDS_WITHIN_S)
        for call in calls:
            call.answer.cancel()

    async def sleep(self) -> None:
        """Free the cache and move the weights to the host's memory; see `Engine.sleep`. On the CPU: only hold requests.

        Raises `ConfigError` when vLLM was not started for it.
        """
        self._check_alive()
        if not self._can_sleep() and not current_platform.is_cpu():
            raise ConfigError("vLLM keeps the GPU's memory: set engine_args = { enable_sleep_mode = true }")
        self._asleep = True
        self._open.clear()
        await self.abort([call.request for call in self._calls if call.begun])
        if self._can_sleep():
            await self._ask(self._vllm.sleep(level=1))

    async def wake(self) -> None:
        """Take the memory back and serve; see `Engine.wake`."""
        self._check_alive()
        if self._can_sleep():
            await self._ask(self._vllm.wake_up())
        self._asleep = False
        self._open.set()

    async def close(self) -> None:
        """Stop; running requests end with `EngineDead`."""
        self._dead = self._dead or "is closed"
        self._open.set()
        for call in self._calls:
            call.answer.cancel()
        vllm, self._vllm = self._vllm, None
        if vllm is None:
            return
        if vllm.output_handler is not None:
            vllm.output_handler.cancel()  # it would report the end of vLLM's process as a failure
        await asyncio.to_thread(vllm.shutdown)

    def _can_sleep(self) -> bool:
        return bool(self._vllm.vllm_config.model_config.enable_sleep_mode)

    def _check_alive(self) -> None:
        if self._dead is None and self._vllm.errored:
            self._dead = f"died: {self._vllm.dead_error}"
        if self._dead is not None:
            raise EngineDead(f"the engine {self._dead}")

    def _died(self, reason: str) -> EngineDead:
        self._dead = self._dead or f"died: {reason}"
        self._open.set()  # who waits hears of it
        return EngineDead(reason)
