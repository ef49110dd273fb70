"""Dialects: a kind of server's requests and answers, and its routes for weights.

The pool, its retries and its checks are the same for every kind. Modules implement the protocols below.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import aiohttp
import numpy as np

from rollq.buffer.values.rollouts import Float32Array, Int32Array
from rollq.workers.engines.openai.tokens import Part
from rollq.workers.engines.protocol import Request, WeightsVersion

NO_VERSION = WeightsVersion(0, 0, "")
NO_LIMIT_TOKENS = 1 << 62
"""The context of a server that does not report one; the server itself refuses requests that are too long."""
PROBE_IDS = np.array([1, 2, 3, 4], np.int32)
"""The prompt of the requests that check a server."""
TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A folder of weights (an absolute path), and the tensors to load a second time, under another name."""

    folder: Path
    version: WeightsVersion
    copies: Mapping[str, str]

    @property
    def name(self) -> str:
        """The weight version's name on the server."""
        return f"{self.version.epoch}.{self.version.version}.{self.version.digest[:16]}"


class Api(Protocol):
    """A kind of server's requests and answers. Pure: plain values in and out."""

    @property
    def NEEDED(self) -> str:
        """For messages: which servers answer as `read_part` expects."""

    def url_of(self, server: str, /) -> str:
        """A server's address for completions."""

    def request_body(self, request: Request, tokens: int, version: WeightsVersion, /) -> dict[str, Any]:
        """A request for at most `tokens` new tokens, without the model's name."""

    def read_part(self, answer: Any, have: int, /) -> Part:
        """The new tokens, after `have` tokens, in an answer or in an event of a streamed answer.

        Raises `LookupError`, `TypeError` or `ValueError` when a value that training needs is missing.
        """

    def status_of(self, event: Any, /) -> int | None:
        """The HTTP status of an error in a streamed event; None if the event has no error."""

    def probe_body(self, most_tokens: int, /) -> dict[str, Any]:
        """A request whose answer shows whether logprobs belong to the sampled distribution."""

    def check_probe(self, answer: Any, /) -> None:
        """Raise `ValueError` unless the answer to `probe_body` has the logprobs of the sampled distribution."""

    def score_body(self, prompt: Int32Array, /) -> dict[str, Any]:
        """A request for the logprobs of a prompt's tokens, int32 [T]."""

    def read_scores(self, answer: Any, prompt: Int32Array, /) -> Float32Array:
        """The logprobs float32 [T - 1] in nats of a prompt's tokens except the first, NaN where the server has none.

        Raises `ValueError` if the answer has none."""

    def fingerprint_body(self) -> dict[str, Any]:
        """A request whose answer identifies the weights."""

    def read_fingerprint(self, answer: Any, /) -> Float32Array:
        """The logprobs float32 [`TOP_LOGPROBS`] in nats, largest first. Raises `ValueError` if the answer has none."""


class WeightRoutes(Protocol):
    """How weights are loaded into a server. Each function raises `TransientError` or `ValueError` when it fails."""

    @property
    def NEEDED(self) -> str:
        """For messages: how to start a server that takes weights."""

    def resume(self, http: aiohttp.ClientSession, url: str, /) -> Awaitable[None]:
        """Resume a server that may have been left paused."""

    def check(self, http: aiohttp.ClientSession, url: str, weights: Weights, /) -> Awaitable[None]:
        """Fail if the server cannot read the folder, where a route can check that. Changes nothing on the server."""

    def load(self, http: aiohttp.ClientSession, url: str, weights: Weights, /) -> Awaitable[bool]:
        """Make an idle server serve `weights`. Returns False if it already served them."""


class Description(NamedTuple):
    """The name of a server's model (empty if requests need no name), and the model's context in tokens. `dtype` is
    torch's name of the forward pass's dtype, or the quantization's name; `max_sequences` is the number of sequences
    that the server runs at a time. None means unknown."""

    model: str
    context_tokens: int
    dtype: str | None = None
    max_sequences: int | None = None


class Describe(Protocol):
    """Asks a server for its description."""

    def __call__(
        self, http: aiohttp.ClientSession, url: str, model: str | None, /, *, pushes: bool
    ) -> Awaitable[Description]:
        """Describe the server at `url`, which should serve the model named `model`. With `pushes`, weights will be
        pushed into the server.

        Raises `TransientError`, or `ValueError` for a server that cannot serve training.
        """


@dataclass(frozen=True, slots=True)
class Dialect:
    """One kind of server. `engine` is its engine's name in `[worker]`; `warning` is logged at the start."""

    engine: str
    api: Api
    weights: WeightRoutes
    describe: Describe
    warning: str | None = None
