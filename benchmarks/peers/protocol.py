"""The process of a store: `serve` measures one request for each line of its standard input.

Imports only what every environment has: the standard library and numpy.
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

GROUP_SIZE = 8
VOCABULARY = 150_000

Columns = Mapping[str, NDArray[Any]]
"""A group, with one row per sample: `prompt_ids` and `response_ids` (int32), `logprobs` (float32), `rewards`
(float32, without a second axis)."""


class Request(NamedTuple):
    """Tokens of each sample, groups in a call, and calls."""

    prompt_tokens: int
    response_tokens: int
    groups: int
    calls: int


class Store(Protocol):
    """A store that groups pass through. `version` names it and the libraries that matter."""

    version: str

    def prepare(self, groups: Sequence[Columns], calls: int) -> None:
        """Make ready, untimed, before `calls` exchanges of `groups`."""

    def exchange(self) -> NDArray[Any]:
        """Put the groups with one call, take them with one, and decode them to columns.

        Returns the `response_ids` of the last sample of one of the groups that were taken.
        """

    def finish(self) -> None:
        """Clean up, untimed, after the exchanges."""


def serve(store: Store) -> None:
    """Print the store's version, then the seconds that each request took, until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print there, and their lines are not replies
    print(store.version, file=replies, flush=True)
    for line in sys.stdin:
        print(measure(store, Request(*json.loads(line))), file=replies, flush=True)


def measure(store: Store, request: Request) -> float:
    """How many seconds the calls of a request took. Raises RuntimeError when a group comes back changed."""
    groups = make_groups(request.prompt_tokens, request.response_tokens, request.groups)
    store.prepare(groups, request.calls)
    started_s = time.perf_counter()
    for _ in range(request.calls):
        taken = store.exchange()
    elapsed_s = time.perf_counter() - started_s
    store.finish()
    if not any(np.array_equal(taken, group["response_ids"][-1]) for group in groups):  # in any order
        raise RuntimeError("a group came back changed")
    return elapsed_s


@lru_cache(maxsize=1)
def make_groups(prompt_tokens: int, response_tokens: int, count: int) -> list[Columns]:
    """`count` groups of random ids; the same in every process."""
    random = np.random.default_rng(0)
    prompts, responses = (GROUP_SIZE, prompt_tokens), (GROUP_SIZE, response_tokens)
    return [
        {
            "prompt_ids": random.integers(0, VOCABULARY, prompts, dtype=np.int32),
            "response_ids": random.integers(0, VOCABULARY, responses, dtype=np.int32),
            "logprobs": -random.random(responses, dtype=np.float32),
            "rewards": random.integers(0, 2, GROUP_SIZE).astype(np.float32),
        }
        for _ in range(count)
    ]
