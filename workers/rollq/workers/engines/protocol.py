"""The protocol of inference engines: token ids in; token ids, logprobs and version spans out.

Invariant: every returned token carries the version of the weights that generated it, and its logprob under the
distribution (after temperature) that was sampled. Agent loops and the trainer's importance ratios rely on this.
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
"""The number of sequences that an engine gets at a time if it reports no limit."""
REPORT_TOKENS = 128
"""An engine reports a running request's tokens whenever this many are new."""


class WeightsVersion(NamedTuple):
    """Identity of weights: after a rewind, the same version number in a new epoch means different weights."""

    epoch: int
    version: int
    digest: str


class SwapMode(StrEnum):
    """The fate of running requests when weights are swapped."""

    WAIT = "wait"  # they finish on the old weights first
    ABORT = "abort"  # they return their tokens so far, with finish reason `abort`
    KEEP = "keep"  # they freeze, and continue under the new weights with a recomputed cache
    RESTART = "restart"  # like `abort`, and the engine restarts with the weights: for models that cannot reload them


@dataclass(frozen=True, slots=True)
class Sampling:
    """All sampling parameters. With the defaults, tokens are drawn from the model's unchanged distribution.

    A response ends with an EOS token, unless `ignore_eos`, or with one of `stop_token_ids`. `logit_bias` maps token
    ids, as decimal strings, to numbers that are added to the tokens' logits. At most one of `guided_json`, a JSON
    schema, and `guided_regex` is set.
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
        """The plain values that are stored with the sample: the usual parameters, and the rare parameters that are
        set."""
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
    """One sequence to generate. `prefix_ids` holds existing response tokens (partial rollout); the engine continues
    them and returns only new tokens. `sampling.max_tokens` counts new tokens.

    If the request `must_finish`, swaps in every mode wait for it once it runs, and all its tokens have one version. The
    engine calls `report` on the event loop after every `REPORT_TOKENS` tokens, with all new tokens so far and their
    versions; `report` does not raise. An engine that cannot see a running request's tokens never calls it.
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
        """The token ids int32 that the engine continues: prompt and prefix."""
        return self.prompt_ids if self.prefix_ids is None else np.concatenate([self.prompt_ids, self.prefix_ids])


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One request's new tokens: `ids` int32 [R], EOS included; `logprobs` float32 [R] in nats; `versions`, which cover
    R.

    `versions` is empty if the engine reports none; all tokens then get the version at the request's start. `arrays`
    holds further values per token (routed experts, top-k logprobs): each array is [R, ...] for the new tokens, or [P +
    R, ...] with the P tokens of prompt and prefix, with 0 for a token without a value.
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
    """The engine refuses a request that can never work."""

    def __init__(self, reason: str) -> None:
        super().__init__(FailureKind.PROVIDER, reason)


class EngineDead(RollqError, RuntimeError):
    """The inference engine has died; the worker restarts the engine or exits."""


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
        """From now on, serve the weights in directory `weights`, one or several safetensors files or an adapter, as
        `version`. Returns the number of seconds without token generation.

        Raises `rollq.buffer.errors.WeightsError`, and still serves the old weights, when the directory does not hold
        exactly the model's tensors (names and shapes).
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
    """The additional members of an `Engine` that can score given tokens. Weight checks use them.

    `dtype` is torch's name for the dtype of its forward pass (`bfloat16`), or the name of its quantization.
    """

    dtype: str
    vocabulary: int

    async def score(self, prompts: Sequence[Int32Array]) -> Sequence[Float32Array] | None:
        """Return, for each prompt int32 [T], the logprobs float32 [T - 1] in nats of all tokens except the first, under
        the current weights; None if the engine cannot score. Called only while no weights change. Raises
        `EngineDead`."""


@runtime_checkable
class Summing(Protocol):
    """The additional method of an `Engine` that can add up its parameters."""

    async def bit_sums(self) -> Mapping[str, BitSums]:
        """The parameters' sums, by their names in transformers. Raises `EngineDead`."""


@runtime_checkable
class CachingEngine(Engine, Protocol):
    """The additional method of an `Engine` that reuses earlier prompts' keys and values."""

    async def cache_error(self) -> float:
        """The mean distance, in nats, between next-token logprobs with and without the cache, after a prompt from
        before the last swap. Large distances reveal stale keys and values. Raises `EngineDead`."""


@runtime_checkable
class BoundedEngine(Protocol):
    """The additional member of an `Engine` that can report its number of concurrent sequences."""

    @property
    def max_sequences(self) -> int | None:
        """The number of sequences that run at a time; further requests would only wait in the engine. None means no
        limit. Known after the engine has started."""


@runtime_checkable
class ImageEngine(Protocol):
    """The additional member of an `Engine` whose model reads images."""

    @property
    def takes_images(self) -> bool:
        """Whether the served model reads `Request.images`. If not, requests with images are refused."""


class Tokenizer(Protocol):
    """The tokenizer methods that loops and judges use."""

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a whole prompt's text, with a prompt's special tokens, such as BOS."""

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """The text of `ids`; special tokens are left out unless `special`."""

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render a conversation and tool definitions with the chat template, up to the assistant's turn."""

    def chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The token ids of what `render` returns."""

    def chat_continued(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """The token ids of a conversation that ends in the middle of the assistant's last message."""

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
    """Parse an engine's finish reason, in upper or lower case. Returns `ERROR`, and logs a line, if the reason is
    missing or unknown."""
    if isinstance(raw, FinishReason):
        return raw
    try:
        return FinishReason(str(raw).lower())
    except ValueError:
        log.warning("the engine gave finish reason %r: the sample failed", raw)
        return FinishReason.ERROR
