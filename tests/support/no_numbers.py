"""Prompts without columns of numbers."""

import numpy as np
import numpy.typing as npt


def no_numbers(column: str) -> npt.NDArray[np.float64]:
    raise AssertionError(f"nothing asks for the column {column!r}")
