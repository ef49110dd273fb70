"""A Hugging Face causal LM in this process, on the CPU or one GPU, with continuous batching.

rollq batches requests itself, because behaviour logprobs must survive weight swaps in the middle of a sequence; see
`driver` for the batch's turns and `decode_batch` for its cache.
"""

import asyncio
import secrets
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from transformers import AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from rollq.buffer.errors import ConfigError, ImageError
from rollq.buffer.images.processor import ImageProcessor, model_class
from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.rollouts import FinishReason, Float32Array, Int32Array
from rollq.buffer.weights.bit_sums import COMPARABLE, bit_sums
from rollq.buffer.weights.probe import BitSums
from rollq.workers.engines.gate import RequestGate
from rollq.workers.engines.limits import check_ids, check_supported, token_limit
from rollq.workers.engines.protocol import Completion, Request, SwapMode, WeightsVersion
from rollq.workers.engines.transformers.decode_batch import ActiveSequence, DecodeBatch
from rollq.workers.engines.transformers.driver import DecodeDriver, Job
from rollq.workers.engines.transformers.expert_recorder import ExpertRecorder
from rollq.workers.engines.transformers.weights import read_weights
from rollq.workers.tokenizers.hugging_face import HfTokenizer, model_eos_ids


class TransformersSettings(Settings):
    """The model to serve and the device."""

    model: Path = Field(description="folder written by save_pretrained")
    device: str = Field(default="auto", description="auto (cuda if there is one), cpu, cuda, cuda:1, ...")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(default="float32", description="dtype of the weights")
    max_batch: int = Field(default=512, gt=0, description="how many sequences are decoded together")
    return_routed_experts: bool = Field(
        default=False, description="return the experts of every token, for [trainer] replay_experts"
    )


class TransformersEngine:
    """`Engine` over a causal LM with full attention. Requests join the running batch after its current step."""

    def __init__(self, settings: TransformersSettings) -> None:
        self._settings = settings
        self.dtype, self.vocabulary = settings.dtype, 0  # the vocabulary is known after the start
        self.takes_images = False  # until the engine has started
        self.max_sequences = settings.max_batch
        self._gate: RequestGate[Job] = RequestGate(self._stop, opened=self._look_for_work)
        self._driver = DecodeDriver(self._gate, settings.max_batch)

    @property
    def version(self) -> WeightsVersion:
        """The weights that serve now."""
        return self._driver.version

    async def start(self) -> None:
        """Load the model. Raises `ConfigError` if the folder has no model, the device does not exist, or the settings
        ask for experts that the model lacks or that cannot be recorded."""
        self._model = await self._driver.compute(load_model, self._settings)
        self._device: torch.device = self._model.device
        self.vocabulary = int(self._model.config.get_text_config().vocab_size)
        eos_ids = model_eos_ids(self._settings.model)
        recorder = ExpertRecorder(self._model) if self._settings.return_routed_experts else None
        self.takes_images = model_class(self._settings.model) is AutoModelForImageTextToText
        batch = DecodeBatch(
            self._model, eos_ids, lambda ids: self._tokenizer.decode(ids), recorder, lambda: self._image_processor
        )
        self._driver.start(self._model, batch)
        self._gate.start()

    async def generate(self, request: Request) -> Completion:
        """Generate one sequence; see `Engine.generate`."""
        self._gate.check_alive()
        if request.images is not None and hasattr(self._model.model, "get_rope_index"):
            raise ImageError(
                f"engine 'transformers' cannot read images for {type(self._model).__name__}, whose positions depend on "
                "them: use engine 'vllm'"
            )
        job = Job(request, sequence=make_sequence(request, self._model.config.get_text_config()))
        completion = await self._gate.serve(job, self._driver.decode)
        return job.sequence.completion(FinishReason.ABORT) if completion is None else completion

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Serve other weights; see `Engine.swap`. Generation continues while the file is read."""
        async with self._gate.swap():
            checked = await asyncio.to_thread(read_weights, weights, self._model)
            async with self._gate.closed(mode):
                return await self._driver.swap(checked, version)

    async def score(self, prompts: Sequence[Int32Array]) -> Sequence[Float32Array]:
        """Score prompts between two steps; see `Scorer.score`."""
        return await self._driver.compute(score, self._model, prompts)

    async def bit_sums(self) -> Mapping[str, BitSums]:
        """See `Summing.bit_sums`."""
        return await self._driver.compute(bit_sums, self._model, COMPARABLE)

    async def abort(self, requests: Collection[Request]) -> None:
        """End requests after the current step; see `Engine.abort`."""
        await self._gate.abort(requests)

    async def _stop(self, jobs: Collection[Job]) -> None:
        await self._driver.stop(list(jobs))

    def _look_for_work(self) -> None:
        self._driver.wake()

    async def sleep(self) -> None:
        """Free the cache and, on a GPU, move the weights to the host's memory; see `Engine.sleep`."""
        await self._gate.sleep()
        await self._driver.compute(self._move, torch.device("cpu"))

    async def wake(self) -> None:
        """Move the weights back and serve; see `Engine.wake`."""
        self._gate.check_alive()
        await self._driver.compute(self._move, self._device)
        self._gate.wake()

    async def close(self) -> None:
        """Stop after the current step; running requests end with `EngineDead`."""
        self._gate.fail("the engine is closed")
        await self._driver.close()

    def _move(self, device: torch.device) -> None:
        """Move the weights to `device`, and free cached GPU memory. Runs in the engine's thread."""
        self._model.to(device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @cached_property
    def _image_processor(self) -> ImageProcessor:
        return ImageProcessor(self._settings.model)

    @cached_property
    def _tokenizer(self) -> HfTokenizer:
        """The tokenizer, which only stop strings need."""
        return HfTokenizer(self._settings.model)


def load_model(settings: TransformersSettings) -> Any:
    """Load the model that the settings name, ready for inference. Raises `ConfigError` if this fails."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    transformers_logging.disable_progress_bar()
    try:
        model: Any = model_class(settings.model).from_pretrained(
            settings.model, dtype=getattr(torch, settings.dtype), local_files_only=True
        )
        return model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, AssertionError) as error:  # raised by torch without CUDA
        raise ConfigError(f"cannot load model {str(settings.model)!r} on {device!r}: {error}") from error


def make_sequence(request: Request, config: Any) -> ActiveSequence:
    """Check the request against the model's `config`, and return it as a sequence. Raises `ValueError`."""
    check_supported(request.sampling, "transformers")
    limit = token_limit(request, config.max_position_embeddings)
    prefix = [] if request.prefix_ids is None else request.prefix_ids.tolist()
    context = request.prompt_ids.tolist() + prefix
    check_ids(context, config.vocab_size)
    seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
    return ActiveSequence(context, len(prefix), request.sampling, seed, limit, versions=[], images=request.images)


@torch.no_grad()
def score(model: Any, prompts: Sequence[Int32Array]) -> list[Float32Array]:
    """For each prompt int32 [T], the logprobs float32 [T - 1] of its tokens except the first."""
    scores = []
    for prompt in prompts:
        ids = torch.from_numpy(prompt).long().to(model.device)
        logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        scores.append(logprobs.gather(-1, ids[1:, None]).squeeze(-1).cpu().numpy())
    return scores
