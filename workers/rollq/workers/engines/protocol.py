"""The protocol of inference engines: token ids in; token ids, logprobs and version spans out.

Invariant: every token returned carries the version of the weights that made it, and its logprob belongs to the
distribution that it was sampled from (after temperature). Agent loops and the trainer's importance ratios rely on this.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rollq.buffer.errors import RollqError
from rollq.buffer.images.processor import PlacedImages
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Float32Array, Int32Array, VersionSpan
from rollq.buffer.weights.probe import BitSums

log = logging.getLogger(__name__)


SEQUENCES = 256
"""How many sequences an engine gets at a time if it reports no limit."""
REPORT_TOKENS = 128
"""An engine reports a running request's tokens after this many new tokens."""


class WeightsVersion(NamedTuple):
    """Identity of weights: after a rewind, the same version number in a new epoch means different weights."""

    epoch: int
    version: int
    digest: str


class SwapMode(StrEnum):
    """The fate of running requests when weights are swapped."""

    WAIT = "wait"  # they finish on the old weights first
    ABORT = "abort"  # they return what they have, finish reason `abort`
    KEEP = "keep"  # they freeze, and continue under the new weights with a recomputed cache
    RESTART = "restart"  # like `abort`, and the engine restarts with the weights: for models that cannot reload them


@dataclass(frozen=True, slots=True)
class Sampling:
    """Every parameter of sampling. All defaults except `temperature` have no effect.

    A response ends with an EOS token, unless `ignore_eos`, or with one of `stop_token_ids`. `logit_bias` maps token ids
    in decimal, as text, to numbers that are added to their logits. At most one of `guided_json`, a JSON schema, and
    `guided_regex` is set.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    min_p: float = 0.0
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    guided_json: Mapping[str, Any] | None = None
    guided_regex: str | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as stored with the sample: the usual parameters, and the rare parameters that are set."""
        return {name: getattr(self, name) for name in _USUAL} | self.rare()  # asdict would copy deeply

    def rare(self) -> dict[str, Any]:
        """The parameters from `min_p` on that have an effect."""
        return {name: value for name, neutral in _NEUTRAL.items() if (value := getattr(self, name)) != neutral}

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a response, for a model with these EOS tokens."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)


_USUAL = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")
_NEUTRAL = {field.name: getattr(Sampling(1), field.name) for field in fields(Sampling) if field.name not in _USUAL}


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One sequence to generate. `prefix_ids` are response tokens that already exist (partial rollout); the engine
    continues them and returns only new tokens; `sampling.max_tokens` counts new tokens.

    If it `must_finish`, swaps of every mode wait for it once it runs, and all its tokens have one version. `report`
    receives all new tokens so far, with their versions, after every `REPORT_TOKENS` tokens. It is called on the event
    loop and does not raise. An engine that cannot see the tokens of a running request never calls it.
    """

    prompt_ids: Int32Array
    sampling: Sampling
    prefix_ids: Int32Array | None = None
    priority: int = 0  # smaller runs first
    must_finish: bool = False
    report: "Callable[[Completion], None] | None" = None
    session: str | None = None  # shared by the requests of one conversation, which prefer the same server
    images: PlacedImages | None = None  # `prompt_ids` hold their tokens

    @property
    def context(self) -> Int32Array:
        """Token ids int32 that the engine continues: prompt and prefix."""
        return self.prompt_ids if self.prefix_ids is None else np.concatenate([self.prompt_ids, self.prefix_ids])


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """New tokens of one request: `ids` int32 [R], EOS included; `logprobs` float32 [R] in nats; `versions` cover R.

    `versions` is empty if the engine does not report versions. Then all tokens count as of the version at the request's
    start. `arrays` hold further values per token (routed experts, top-k logprobs): each [R, ...] over the new tokens,
    or [P + R, ...] over the P tokens of prompt and prefix too; 0 for a token without a value.
    """

    ids: Int32Array
    logprobs: Float32Array
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class ContextFull(SampleFailed, ValueError):
    """The prompt and the prefix leave no room for a token in the model's context."""

    def __init__(self, reason: str) -> None:
        super().__init__(FailureKind.CONTEXT, reason)


class RequestRefused(SampleFailed, ValueError):
    """The engine refuses a request, which can never work."""

    def __init__(self, reason: str) -> None:
        super().__init__(FailureKind.PROVIDER, reason)


class EngineDead(RollqError, RuntimeError):
    """The inference engine has died; the worker restarts it or exits."""


class Engine(Protocol):
    """An inference engine. All methods run on the worker's event loop."""

    @property
    def version(self) -> WeightsVersion:
        """The weights that serve now."""

    async def start(self) -> None:
        """Load the model. Afterwards `version` identifies its weights."""

    async def generate(self, request: Request) -> Completion:
        """Generate one sequence. Cancelling the task frees the request.

        Raises `ValueError` for a request that can never work, including `ContextFull`, and `EngineDead` when the engine
        has died.
        """

    async def swap(self, weights: Path, version: WeightsVersion, mode: SwapMode) -> float:
        """Serve the weights of directory `weights` as `version` from now on: one or several safetensors files, or an
        adapter. Returns for how many seconds no tokens could be generated.

        Raises `rollq.buffer.errors.WeightsError`, with the old weights still serving, when the directory does not hold
        exactly the tensors (names and shapes) of the model.
        """

    async def abort(self, requests: Collection[Request]) -> None:
        """End these requests soon, running or waiting. `generate` then returns their tokens so far, with finish reason
        `abort`.

        Requests that have already ended are ignored.
        """

    async def sleep(self) -> None:
        """Free the accelerator's memory: drop caches, and move weights off the device. Abort running requests first.

        Requests that arrive while the engine sleeps wait. The worker swaps no weights then.
        """

    async def wake(self) -> None:
        """Serve again, after `sleep`."""

    async def close(self) -> None:
        """Stop; running requests end with `EngineDead`."""


@runtime_checkable
class Scorer(Protocol):
    """The additional members of an `Engine` that can score given tokens. Checks of its weights use them.

    `dtype` is torch's name for the dtype of its forward pass (`bfloat16`), or the name of its quantization.
    """

    dtype: str
    vocabulary: int

    async def score(self, prompts: Sequence[Int32Array]) -> Sequence[Float32Array] | None:
        """For each prompt int32 [T], the logprobs float32 [T - 1] in nats of all tokens except the first, under the
        current weights; None if the engine cannot score. Called only while no weights change. Raises `EngineDead`."""


@runtime_checkable
class Summing(Protocol):
    """The additional method of an `Engine` that can add up its parameters."""

    async def bit_sums(self) -> Mapping[str, BitSums]:
        """The sums of its parameters, by their names in transformers. Raises `EngineDead`."""


@runtime_checkable
class CachingEngine(Engine, Protocol):
    """The additional method of an `Engine` that reuses keys and values of earlier prompts."""

    async def cache_error(self) -> float:
        """The mean distance, in nats, between logprobs of next tokens with and without the cache, after a prompt that
        was also used before the last swap. It detects stale keys and values. Raises `EngineDead`."""


@runtime_checkable
class BoundedEngine(Protocol):
    """The additional member of an `Engine` that can report how many sequences it runs at a time."""

    @property
    def max_sequences(self) -> int | None:
        """How many sequences run at a time: further requests would only wait in the engine. None means no limit. Read
        after the engine has started."""


@runtime_checkable
class ImageEngine(Protocol):
    """The additional member of an `Engine` whose model reads images."""

    @property
    def takes_images(self) -> bool:
        """Whether the served model reads `Request.images`. If not, requests with images are refused."""


class Tokenizer(Protocol):
    """The part of a tokenizer that loops and judges use."""

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that is a whole prompt, with a prompt's special tokens, such as BOS."""

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """Text of `ids`, without special tokens unless `special`."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation and definitions of tools by the chat template, up to the assistant's turn."""

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of `render`."""

    def chat_continued(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation that ends in the middle of the assistant's last message."""

    @property
    def chat_template(self) -> str | None:
        """The template that `render` uses for conversations with tools; None without a template."""

    @property
    def template_options(self) -> Mapping[str, Any]:
        """The task's values for variables of the template."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def eos_id(self) -> int:
        """The id that ends a finished response."""


def parse_reason(raw: object) -> FinishReason:
    """An engine's finish reason, in any case; `ERROR`, with a log line, if it is missing or unknown."""
    if isinstance(raw, FinishReason):
        return raw
    try:
        return FinishReason(str(raw).lower())
    except ValueError:
        log.warning("the engine gave finish reason %r: the sample failed", raw)
        return FinishReason.ERROR
