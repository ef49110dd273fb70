"""vLLM in this worker's process (`AsyncLLM`); versions 0.30 to 0.33. Only this package runs vLLM.

A swap pauses vLLM, loads the weights, names the version, and resumes. No request reaches vLLM in the meantime
(`RequestGate`). Therefore, vLLM's version spans name the weights that generated each token. With `recompute_cache`,
running requests lose their cache at the pause, and continue with the new weights' keys and values.

Weights are checked before vLLM loads them: a load that fails half-way kills vLLM at its next step, and vLLM ignores
missing tensors.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from rollq.buffer.common.log_once import LogOnce
from rollq.buffer.errors import ConfigError, ImageError, WeightsError
from rollq.buffer.values.rollouts import FinishReason, Float32Array, Int32Array
from rollq.buffer.values.routed_experts import ROUTED_EXPERTS
from rollq.buffer.weights.manifest import published_files
from rollq.buffer.weights.probe import TOLERANCES, BitSums, difference, probe_prompts, tolerance_of
from rollq.workers.engines.gate import RequestGate
from rollq.workers.engines.limits import check_ids, token_limit
from rollq.workers.engines.protocol import REPORT_TOKENS, Completion, Request, SwapMode, WeightsVersion
from rollq.workers.engines.receiver import Incoming
from rollq.workers.engines.tensors import Tensors, check_tensors, is_adapter, read_tensors, tied_heads
from rollq.workers.engines.vllm.adapter_files import check_adapter
from rollq.workers.engines.vllm.adapters import Adapters, VllmCall, outlives, used_adapters
from rollq.workers.engines.vllm.api import (
    OutputReader,
    check_prompt,
    image_input,
    images_problem,
    name_of,
    sampling_parameters,
)
from rollq.workers.engines.vllm.process import SUPPORTS_REJOINING, SUPPORTS_VERSIONS, VllmProcess
from rollq.workers.engines.vllm.routed_experts import ARGUMENT, ExpertShape
from rollq.workers.engines.vllm.scoring import PromptScores, Served
from rollq.workers.engines.vllm.settings import VllmSettings
from rollq.workers.tokenizers.hugging_face import CONFIG_FILE, model_eos_ids

__all__ = ["VllmEngine", "VllmSettings"]

log = logging.getLogger(__name__)

NOT_CONFIG = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
"""File name extensions of weights."""
ABORT_S = 1.0
"""How many seconds an aborted request may take to end. vLLM ignores aborts of requests that it has not registered
yet."""


class VllmEngine:
    """`Engine` over `AsyncLLM`. A group's samples are separate requests that share the prompt's cache."""

    def __init__(self, settings: VllmSettings) -> None:
        self.version = WeightsVersion(0, 0, "")
        self.dtype, self.vocabulary, self.takes_images = "", 0, False  # known after the start, as is max_sequences
        self.max_sequences = 1
        self._settings = settings
        self._process: VllmProcess | None = None
        self._names = count()
        self._gate: RequestGate[VllmCall] = RequestGate(self._stop)
        self._unknown_versions = LogOnce(log)

    async def start(self) -> None:
        """Load the model; takes seconds to minutes. Raises `ConfigError` if vLLM cannot serve it."""
        if "weight_transfer_config" in self._settings.engine_args and not SUPPORTS_REJOINING:
            raise ConfigError("engine_args: weight transfer needs vLLM 0.32 or later; this version can do it only once")
        self._tensors = model_tensors(self._settings.model)
        try:
            await self._prepare(await self._start_process(self._settings))
        except BaseException:
            await self.close()
            raise
        self._gate.start()

    async def _prepare(self, process: VllmProcess) -> None:
        config = process.llm.vllm_config.model_config
        if process.max_adapters and config.get_num_experts() and current_platform.is_cpu():
            raise ConfigError(
                f"vLLM on the CPU cannot run adapters on experts, which {', '.join(config.architectures)} has: it "
                "would die at its first request. Leave enable_lora out of engine_args, or use GPUs"
            )
        tied = getattr(config.hf_text_config, "tie_word_embeddings", False)
        self._copies = tied_heads(self._tensors) if tied else {}
        self._context_tokens = int(config.max_model_len)
        self._layers = int(config.hf_text_config.num_hidden_layers)
        self._expert_shape = ExpertShape.of(config) if self._settings.engine_args.get(ARGUMENT) else None
        self.dtype = config.quantization or str(config.dtype).removeprefix("torch.")
        self.vocabulary = int(config.get_vocab_size())
        self.max_sequences = process.max_sequences
        self.takes_images = bool(config.is_multimodal_model)
        self._images_problem = images_problem(config, on_cpu=current_platform.is_cpu())
        self._eos_ids = model_eos_ids(self._settings.model)
        self._no_reload = await self._try_reload(process)

    async def _start_process(self, settings: VllmSettings) -> VllmProcess:
        self._process = await VllmProcess.start(settings, self._gate.fail)
        self._adapters = Adapters(self._process)
        self._scores = PromptScores(self._process)
        await self._process.name_version(self.version)
        return self._process

    async def _try_reload(self, process: VllmProcess) -> str | None:
        """Make vLLM load its weights again. Returns the reason why it cannot, or None if it can.

        If it cannot, vLLM has been restarted. The trial is skipped with LoRA, since the base model is never reloaded.
        """
        if process.max_adapters:
            return None
        prompts = probe_prompts(self.vocabulary)
        await self._scores.cache_error(self._served)  # caches the prompt that later calls use
        before = await self._scores.score(prompts, self._served)
        try:
            reload = process.llm.collective_rpc("rollq_reload", args=(str(self._settings.model), self._copies))
            await process.unless_dead(reload)
            apart = difference(before, await self._scores.score(prompts, self._served))
            if apart <= tolerance_of(self.dtype):
                return None
            problem = f"its logprobs are {apart:.2g} nats apart on average"
        except Exception as error:  # noqa: BLE001 - vLLM's loaders raise any class
            problem = f"{type(error).__name__}: {error}"
        await process.close()
        await self._start_process(self._settings)
        family = ", ".join(process.llm.vllm_config.model_config.architectures)
        return f"vLLM cannot load weights into a running {family}: after a reload of the same, {problem}"

    async def generate(self, request: Request) -> Completion:
        """Generate one sequence; see `Engine.generate`."""
        self._gate.check_alive()  # not `_living`: while vLLM restarts, requests wait at the gate
        ids = request.context.tolist()
        tokens = token_limit(request, self._context_tokens)
        check_ids(ids, self.vocabulary)
        if request.images is not None and self._images_problem is not None:
            raise ImageError(self._images_problem)
        call = VllmCall(request, name=f"rollq-{next(self._names)}")
        images = None if request.images is None else await asyncio.to_thread(image_input, ids, request.images)
        completion = await self._gate.serve(call, lambda call: self._ask(call, ids, tokens, images))
        if completion is None:
            return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), (), FinishReason.ABORT)
        return completion

    async def _ask(self, call: VllmCall, ids: list[int], tokens: int, images: Mapping[str, Any] | None) -> Completion:
        process = self._living()
        call.version, call.adapter = self.version, self._adapters.current
        report = call.request.report
        # The salt keeps out cached prompts of other weights, even where running requests keep theirs.
        salt = name_of(call.version)
        prompt = tokens_input(ids, cache_salt=salt) if images is None else {**images, "cache_salt": salt}
        reader, reported = OutputReader(call.version), 0
        try:
            parameters = sampling_parameters(call.request.sampling, tokens, self._eos_ids, streamed=report is not None)
            answers = process.llm.generate(
                prompt, parameters, call.name, lora_request=call.adapter, priority=call.request.priority
            )
            async for answer in answers:  # only the final output, unless tokens are reported
                if images is not None:
                    check_prompt(ids, answer)
                output = answer.outputs[0]
                reader.add(output)
                if report is not None and not answer.finished and reader.tokens - reported >= REPORT_TOKENS:
                    reported = reader.tokens
                    self._report(call, reader)
        except EngineDeadError as error:
            raise process.failed(f"vLLM died: {error}") from error
        except VLLMClientError as error:
            raise ValueError(f"vLLM refuses the request: {error}") from error
        completion = reader.final(output, spans=call.adapter is None)
        if self._expert_shape is None:
            return completion
        experts = self._expert_shape.read(output, len(ids) + len(completion.ids))
        return replace(completion, arrays={ROUTED_EXPERTS: experts})

    async def score(self, prompts: Sequence[Int32Array]) -> Sequence[Float32Array]:
        """Score prompts; see `Scorer.score`. After a swap of all weights, this runs before any request."""
        self._living()
        return await self._scores.score(prompts, self._served)

    async def bit_sums(self) -> Mapping[str, BitSums]:
        """See `Summing.bit_sums`. Empty for quantized weights, since their sums differ."""
        return await self._living().bit_sums() if self.dtype in TOLERANCES else {}

    async def cache_error(self) -> float:
        """See `CachingEngine.cache_error`."""
        self._living()
        return await self._scores.cache_error(self._served)

    @property
    def _served(self) -> Served:
        return Served(self.version, self._adapters.current)

    def _report(self, call: VllmCall, reader: OutputReader) -> None:
        """Report the tokens of a running call, if their versions are known."""
        assert call.request.report is not None
        if call.adapter is not None or not SUPPORTS_VERSIONS:
            call.request.report(reader.so_far(None))
            return
        try:
            starts = self._living().version_starts(call.name)
        except AttributeError as error:
            self._unknown_versions.warning("", "this vLLM hides which weights made the tokens of requests: %s", error)
            return
        if starts:
            call.request.report(reader.so_far(starts))

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Serve other weights, or an adapter; see `Engine.swap`. New requests wait while running requests end and
        the weights are loaded.

        Raises `ConfigError` for `keep` if this vLLM does not report which weights generated each token, and for all
        modes but `restart` if this vLLM cannot reload the model's weights.
        """
        async with self._gate.swap():
            process = self._living()
            adapter = is_adapter(weights)
            self._check_mode(mode, adapter=adapter)
            if adapter:
                await asyncio.to_thread(check_adapter, weights, self._tensors, self._layers)
            else:
                await self._check_folder(process, weights)
            if mode is SwapMode.RESTART and not adapter:
                return await self._restart(process, weights, version)
            stays = outlives(self._gate.running, adapter=adapter, spared=self._adapters.spared(adapter))
            async with self._gate.closed(mode, outlives=stays):
                if adapter:
                    await self._adapters.load(weights, version, used_adapters(self._gate.running))
                    self.version = version
                    return 0.0
                await self._check_folder(process, weights)  # again: the folder may have been removed during draining
                return await self._change_weights(process, version, "rollq_load", str(weights), self._copies)

    @property
    def transfer_ranks(self) -> int:
        """One rank per GPU, if vLLM was started to take weights from a trainer; see `Receiver`."""
        return 0 if self._process is None else self._process.transfer_ranks

    async def receive(self, incoming: Incoming, version: WeightsVersion, mode: SwapMode) -> float:
        """Take weights from the trainer by vLLM's weight transfer; see `Receiver.receive`.

        Raises `ConfigError` as `swap` does.
        """
        async with self._gate.swap():
            process = self._living()
            self._check_mode(mode, adapter=False)
            if mode is SwapMode.RESTART:
                raise ConfigError(
                    "[worker] swap = 'restart' takes weights from files only: set [trainer] transport = 'path'"
                )
            where = f"weight broadcast {incoming.number}"
            check_tensors(incoming.tensors, self._tensors, where, optional=self._copies.values())
            stays = outlives(self._gate.running, adapter=False, spared=0)
            async with self._gate.closed(mode, outlives=stays):
                drained_s = monotonic()
                plan = await incoming.join(process.transfer_ranks)
                waited_s = 0.0 if mode is SwapMode.KEEP else monotonic() - drained_s
                change = self._change_weights(process, version, "rollq_receive", plan.init_info, plan.update_info)
                return waited_s + await change

    def _check_mode(self, mode: SwapMode, *, adapter: bool) -> None:
        if self._no_reload and mode is not SwapMode.RESTART and not adapter:
            raise ConfigError(f"{self._no_reload}. Set [worker] swap = 'restart', which restarts vLLM at each swap")
        if mode is SwapMode.KEEP and not SUPPORTS_VERSIONS:
            raise ConfigError(
                "[worker] swap = 'keep' needs vLLM 0.32 or later, which reports which weights made which token: "
                "set 'wait' or 'abort'"
            )

    async def _check_folder(self, process: VllmProcess, folder: Path) -> None:
        """Raise `WeightsError` if the folder lacks this model's tensors, or a rank cannot read it."""
        tensors = await asyncio.to_thread(read_tensors, folder)
        check_tensors(tensors, self._tensors, str(folder), optional=self._copies.values())
        await process.check_folder(str(folder))

    async def _change_weights(self, process: VllmProcess, version: WeightsVersion, load: str, *args: Any) -> float:
        """Call the extension's method `load` between two of vLLM's steps. Returns the seconds between these steps."""
        started_s = monotonic()
        await process.change(process.llm.pause_generation(mode="keep", clear_cache=self._settings.recompute_cache))
        await process.change(process.llm.collective_rpc(load, args=args))
        if self.takes_images:  # drops the old weights' image encodings, as a pause that clears the cache does
            await process.change(process.llm.reset_encoder_cache())
        await process.name_version(version)
        await self._scores.queue(version)
        await process.change(process.llm.resume_generation())
        self.version, self._adapters.current = version, None
        return monotonic() - started_s

    async def _restart(self, process: VllmProcess, weights: Path, version: WeightsVersion) -> float:
        """Restart vLLM with other weights. Returns the duration in seconds. If it fails, vLLM is dead."""
        async with self._gate.closed(SwapMode.ABORT):
            started_s = monotonic()
            folder = await asyncio.to_thread(join_model, self._settings.model, weights)
            try:
                await process.close()
                self.version = version
                await self._start_process(self._settings.model_copy(update={"model": folder}))
            except Exception as error:
                raise process.failed(f"vLLM did not start with other weights: {error}") from error
            finally:
                await asyncio.to_thread(shutil.rmtree, folder)
            return monotonic() - started_s

    async def abort(self, requests: Collection[Request]) -> None:
        """End requests with their tokens so far; see `Engine.abort`."""
        await self._gate.abort(requests)

    async def _stop(self, calls: Collection[VllmCall]) -> None:
        process = self._living()
        await process.change(process.llm.abort([call.name for call in calls]))
        await asyncio.wait([call.answer for call in calls], timeout=ABORT_S)

    async def sleep(self) -> None:
        """Free the cache and move the weights to the host's memory; see `Engine.sleep`. On the CPU, only hold requests
        back.

        Raises `ConfigError` if vLLM was started without its sleep mode.
        """
        process = self._living()
        if not process.can_sleep and not current_platform.is_cpu():
            raise ConfigError(
                "vLLM keeps the GPU's memory: set engine_args = { enable_sleep_mode = true } in [worker.options]"
            )
        await self._gate.sleep()
        if process.can_sleep:
            await process.change(process.llm.sleep(level=1))

    async def wake(self) -> None:
        """Take the memory back and serve; see `Engine.wake`."""
        process = self._living()
        if process.can_sleep:
            await process.change(process.llm.wake_up())
        self._gate.wake()

    async def close(self) -> None:
        """Stop; running requests end with `EngineDead`."""
        self._gate.fail("the engine is closed")
        process, self._process = self._process, None
        if process is not None:
            await process.close()

    def _living(self) -> VllmProcess:
        """vLLM. Raises `EngineDead` if it has not been started or has died."""
        if self._process is not None:
            self._process.check_alive()
        self._gate.check_alive()
        assert self._process is not None
        return self._process


def model_tensors(folder: Path) -> Tensors:
    """The tensors of the model in `folder`. Raises `ConfigError` if there is no model."""
    if not (folder / CONFIG_FILE).exists():
        raise ConfigError(f"cannot load model {str(folder)!r}: it holds no {CONFIG_FILE}; give a folder with a model")
    try:
        return read_tensors(folder)
    except WeightsError as error:
        raise ConfigError(f"cannot load model {str(folder)!r}: {error}") from error


def join_model(model: Path, weights: Path) -> Path:
    """Make a temporary folder with links to the weights in `weights`, and to the files of `model` other than
    weights."""
    folder = Path(tempfile.mkdtemp(prefix="rollq-model-"))
    others = [path for path in model.iterdir() if path.is_file() and not path.name.endswith(NOT_CONFIG)]
    for path in (*others, *published_files(weights)):
        (folder / path.name).symlink_to(path.absolute())
    return folder
