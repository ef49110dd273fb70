"""Starts and stops vLLM's process behind `AsyncLLM`, and calls vLLM so that its death is noticed."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from multiprocessing import resource_tracker
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rollq.buffer.errors import ConfigError, WeightsError
from rollq.buffer.weights.probe import BitSums
from rollq.workers.engines.protocol import REPORT_TOKENS, EngineDead, WeightsVersion
from rollq.workers.engines.vllm.api import name_of
from rollq.workers.engines.vllm.extension import LoadExtension
from rollq.workers.engines.vllm.guard import ProcessGuard
from rollq.workers.engines.vllm.settings import VllmSettings

CPU_ARGS = {"enable_chunked_prefill": False}
"""Up to vLLM 0.33, a prompt that is split between steps kills the engine on the CPU if the request has a seed."""
SUPPORTS_VERSIONS = "weight_versions" in CompletionOutput.__dataclass_fields__
"""Whether this vLLM reports which weights generated each token; since 0.32."""
SUPPORTS_REJOINING = hasattr(AsyncLLM, "shutdown_weight_transfer_engine")
"""Whether this vLLM frees the process group of a weight transfer and can then join another; since 0.32."""

OTHER_TRANSFERS = frozenset({"ipc", "nccl_m2n", "sharded_rdt", "sparse_nccl"})
"""vLLM's weight transfers that the trainer does not support."""
ORDERLY_S = "1"
"""How many seconds vLLM's core waits for its workers to end before it sends SIGTERM. vLLM's default uses up all of the
core's time."""
LOOK_S = 0.1
"""The seconds between two searches for processes of a cancelled start."""


def start_vllm(settings: VllmSettings, guard: ProcessGuard) -> AsyncLLM:
    """Start vLLM with the model; takes seconds to minutes. vLLM logs the reason for a failure, which its exception
    lacks.

    `guard` marks its processes.

    Raises `ConfigError` if vLLM cannot serve the model.
    """
    model = str(settings.model)
    ours: dict[str, Any] = {
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "worker_extension_cls": f"{LoadExtension.__module__}.{LoadExtension.__qualname__}",
        "mm_processor_cache_gb": 0,  # vLLM dies if this cache is cleared while a request with a cached image is pending
    }
    chosen = {**(CPU_ARGS if current_platform.is_cpu() else {}), **settings.engine_args}
    args = {"disable_log_stats": True, "dtype": settings.dtype, "stream_interval": REPORT_TOKENS, **chosen, **ours}
    # Ctrl-C on a terminal is for the worker, whose groups may still finish: the processes started here inherit the
    # block and do not see it. multiprocessing's own helper is started first: starting it lifts the block, and it must
    # not be marked, since it removes the shared memory of processes that were killed.
    resource_tracker.ensure_running()
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with guard.marking(VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=ORDERLY_S):
            return AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **args))
    except (TypeError, ValueError, RuntimeError, OSError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"vLLM cannot serve model {model!r} with {args!r}: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


class VllmProcess:
    """A running vLLM. `died` is called with the reason once vLLM is found dead or broken."""

    def __init__(self, llm: Any, guard: ProcessGuard, died: Callable[[str], None]) -> None:
        """Call this on the event loop."""
        self.llm = llm
        self._guard = guard
        self._died = died
        llm._run_output_handler()  # detects the end of vLLM's process; vLLM would start it with the first request

    @classmethod
    async def start(cls, settings: VllmSettings, died: Callable[[str], None]) -> "VllmProcess":
        """Start vLLM; see `start_vllm`. When the start fails or is cancelled, none of vLLM's processes is left.

        Raises `EngineDead` if vLLM dies just after its start.
        """
        guard = ProcessGuard()
        starting = asyncio.create_task(asyncio.to_thread(start_vllm, settings, guard))
        try:
            process = cls(await asyncio.shield(starting), guard, died)
            # vLLM would ask this with its first request, which would never end if vLLM had died
            await process.change(process.llm.get_supported_tasks())
            return process
        except BaseException:
            await end_start(starting, guard)
            raise

    @property
    def transfer_ranks(self) -> int:
        """The number of ranks for weight transfer, one per GPU; 0 when vLLM is not configured for the trainer's kind of
        transfer."""
        config = self.llm.vllm_config
        transfer = config.weight_transfer_config
        takes_them = transfer is not None and transfer.backend not in OTHER_TRANSFERS
        return int(config.parallel_config.world_size_across_dp) if takes_them else 0

    @property
    def max_sequences(self) -> int:
        """The number of sequences that vLLM schedules at a time on all its replicas."""
        config = self.llm.vllm_config
        return int(config.scheduler_config.max_num_seqs) * int(config.parallel_config.data_parallel_size)

    @property
    def can_sleep(self) -> bool:
        """Whether vLLM was started with its sleep mode."""
        return bool(self.llm.vllm_config.model_config.enable_sleep_mode)

    @property
    def max_adapters(self) -> int:
        """The number of LoRA adapters that vLLM has room for; 0 without LoRA."""
        lora = self.llm.vllm_config.lora_config
        return 0 if lora is None else int(lora.max_loras)

    def check_alive(self) -> None:
        """Report vLLM as dead if it reports an error."""
        if self.llm.errored:
            self._died(f"the engine died: {self.llm.dead_error}")

    def failed(self, reason: str) -> EngineDead:
        """Report vLLM as dead, and return the error to raise."""
        self._died(f"the engine died: {reason}")
        return EngineDead(reason)

    async def change(self, answer: Awaitable[Any]) -> Any:
        """Await a call that changes all of vLLM. Raises `EngineDead` if it fails half-way, since vLLM is then
        unusable."""
        try:
            return await self.unless_dead(answer)
        except Exception as error:
            raise self.failed(f"vLLM broke: {type(error).__name__}: {error}") from error

    async def check_folder(self, folder: str) -> None:
        """Raise `WeightsError` unless every rank, on any machine, can read the weights in `folder`."""
        try:
            await self.unless_dead(self.llm.collective_rpc("rollq_check", args=(folder,)))
        except EngineDeadError as error:
            raise self.failed(f"vLLM died: {error}") from error
        except Exception as error:
            raise WeightsError(
                f"a rank of vLLM cannot read the weights; all its machines must see them under the same path: {error}"
            ) from error

    async def bit_sums(self) -> dict[str, BitSums]:
        """The sums of all ranks' parameters. Raises `EngineDead`."""
        try:
            ranks = await self.unless_dead(self.llm.collective_rpc("rollq_bit_sums"))
        except EngineDeadError as error:
            raise self.failed(f"vLLM died: {error}") from error
        return {name: BitSums(tuple(shape), tuple(sums)) for rank in ranks for name, (shape, sums) in rank.items()}

    async def unless_dead(self, answer: Awaitable[Any]) -> Any:
        """Await a call that belongs to no request. Raises `EngineDeadError` if vLLM's process ends during the call:
        vLLM itself notifies only requests."""
        asking = asyncio.ensure_future(answer)
        try:
            await asyncio.wait([asking, self.llm.output_handler], return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                raise EngineDeadError
            return asking.result()
        finally:
            asking.cancel()

    async def name_version(self, version: WeightsVersion) -> None:
        """Make vLLM report `version` for all later tokens."""
        if SUPPORTS_VERSIONS:
            await self.change(self.llm.update_weight_version(name_of(version)))

    def version_starts(self, request: str) -> list[tuple[str, int]] | None:
        """The names of the weights that generated a running request's tokens, each with the index of its first token.

        None if the request has ended. vLLM does not report the names of a running request's weights, so this reads
        vLLM's internal records. Raises `AttributeError` if this vLLM keeps them elsewhere.
        """
        records = self.llm.output_processor
        names = records.external_req_ids.get(request)
        return list(records.request_states[names[0]].weight_version_starts) if names else None

    async def close(self) -> None:
        """Stop the process and all processes that it leaves behind."""
        broken = self.llm.errored
        if self.llm.output_handler is not None:
            self.llm.output_handler.cancel()  # it would report the end of vLLM's process as a failure
        try:
            if broken:
                await asyncio.to_thread(self._guard.end_processes)  # vLLM waits longer for processes that died or hang
            await asyncio.to_thread(self.llm.shutdown)
        finally:
            await asyncio.to_thread(self._guard.close)


async def end_start(starting: "asyncio.Task[AsyncLLM]", guard: ProcessGuard) -> None:
    """End a start of vLLM early. The start's thread cannot be stopped, but ends when vLLM's processes die."""
    while not starting.done():
        await asyncio.to_thread(guard.end_processes)
        await asyncio.wait([starting], timeout=LOOK_S)
    if starting.exception() is None:
        await asyncio.to_thread(starting.result().shutdown)
    await asyncio.to_thread(guard.close)
