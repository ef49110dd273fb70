from typing import Any

import numpy as np
import numpy.typing as npt

from rollq.buffer.values.rollouts import Segment

SOURCE: int

def use(
    sample: type,
    segment: type,
    span: type,
    array: type[npt.NDArray[Any]],
    completed: str,
    finish_reasons: tuple[Any, ...],
    details: tuple[Any, ...],
    logprob_tolerance: float,
    short_entries: int,
    /,
) -> None: ...
def scan(samples: object, /) -> tuple[Any, ...] | None: ...
def segments(
    count: int,
    rows: object,
    prompts: list[npt.NDArray[np.int32]],
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    /,
) -> tuple[tuple[Segment, ...], ...] | None: ...
