"""Rows that open an episode: their seeds and their expected openings. Pure."""

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt

ENV: Final = "env"
"""A row's column with the data for reopening its episode. Workers find the data in the prompt's metadata."""
OPENING: Final = "opening"
"""The key, in this column, of the first observation as text."""
SEED: Final = "seed"
SHOWN: Final = 200


def row_seed(seed: int, split: str, row: int) -> int:
    """One row's seed: 31 bits, which every package accepts. It depends on `seed`, `split` and `row`."""
    return int.from_bytes(blake2b(f"{seed}/{split}/{row}".encode(), digest_size=4).digest()) >> 1


def place_of(prompt: Prompt) -> Mapping[str, Any]:
    """The episode that a row opens. Raises `SampleFailed` for a row that no environment exported."""
    place = prompt.metadata.get(ENV)
    if isinstance(place, Mapping) and OPENING in place:
        return place
    raise SampleFailed(FailureKind.PROMPT, f"the row has no {ENV!r}, which opens its episode: export the rows again")


def check_opening(place: Mapping[str, Any], opened: str) -> None:
    """Raise `SampleFailed` if an episode's opening differs from its row's."""
    if (promised := place[OPENING]) != opened:
        raise SampleFailed(
            FailureKind.ENVIRONMENT,
            f"the environment opened with {_shown(opened, promised)}, but its row has {_shown(promised, opened)}",
        )


def _shown(text: str, other: str) -> str:
    """The part of a text that starts shortly before its first difference from another text."""
    same = next((at for at, (mine, its) in enumerate(zip(text, other, strict=False)) if mine != its), None)
    start = 0 if same is None or same < SHOWN // 2 else same - SHOWN // 4
    return ("..." if start else "") + repr(text[start : start + SHOWN])
