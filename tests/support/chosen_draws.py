"""Decides which tokens a vLLM draws. vLLM imports this module in the process of its engine.

Nothing else changes: prefill, decoding, logits, stops, and the logprobs of the drawn tokens are vLLM's own.
"""

from collections.abc import Sequence
from typing import Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.sample.sampler import Sampler

OPEN = -1
"""A draw that vLLM makes itself."""


class ChosenDraws(LogitsProcessor):  # type: ignore[misc]  # vLLM is untyped here
    """Knows which request each row of the batch is. It leaves the logits alone, and replaces what the sampler drew.

    `extra_args` of a request: `draws`, an id or `OPEN` for each token, and `least`, the smallest id of an open draw.
    """

    def __init__(self, *args: Any) -> None:
        self._rows: dict[int, tuple[Sequence[int], int, Sequence[int]]] = {}
        drawn_by = Sampler.sample

        def sample(sampler: Any, *args: Any, **kwargs: Any) -> Any:
            drawn, logprobs = drawn_by(sampler, *args, **kwargs)
            for row, (draws, least, made) in self._rows.items():
                chosen = draws[len(made)] if len(made) < len(draws) else OPEN
                drawn[row] = max(int(drawn[row]), least) if chosen == OPEN else chosen
            return drawn, logprobs

        Sampler.sample = sample

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _row_of)

    def apply(self, logits: Any) -> Any:
        return logits


def _row_of(parameters: Any, _: Any, made: Sequence[int]) -> tuple[Sequence[int], int, Sequence[int]] | None:
    chosen = parameters.extra_args
    return None if not chosen else (chosen["draws"], chosen["least"], made)
