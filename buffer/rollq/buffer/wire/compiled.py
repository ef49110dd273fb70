"""The compiled passes over plain groups. If these were not built, Python does their work. A group is plain if all its
samples have completed without an error, a loss mask or named arrays, as in most groups. The passes never refuse a
group: for groups that are not plain they return None, and the Python code handles the group or reports the problem. For
plain groups, both give the same result, byte for byte.
"""

import logging
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from rollq.buffer.values.rollouts import (
    FinishReason,
    Float32Array,
    Int32Array,
    Sample,
    SampleStatus,
    Segment,
    VersionSpan,
)
from rollq.buffer.wire.frame_format import DETAILS, EMPTY
from rollq.buffer.wire.validation import LOGPROB_TOLERANCE, SHORT_ENTRIES

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("_plain.c")


def load(source: Path = SOURCE) -> ModuleType | None:
    """The compiled module; None if there is none, or if it was compiled from anything but this `source`."""
    try:
        from rollq.buffer.wire import _plain
    except ImportError:  # installed without a compiler
        return None
    if source.is_file() and zlib.crc32(source.read_bytes()) != getattr(_plain, "SOURCE", None):
        log.warning("rollq's compiled codec is of another version, so it is not used: install rollq again")
        return None
    return _plain


passes = load()
if passes:
    passes.use(
        Sample,
        Segment,
        VersionSpan,
        np.ndarray,
        SampleStatus.COMPLETED,
        tuple(part for reason in (None, *FinishReason) for part in (reason, orjson.dumps(reason))),
        tuple(
            (name, tuple(part for kind in kinds if kind in EMPTY for part in (kind, EMPTY[kind])))
            for name, kinds in DETAILS.items()
        ),
        LOGPROB_TOLERANCE,
        SHORT_ENTRIES,
    )


class Scan(NamedTuple):
    """A plain group's content, by sample or by segment. `tokens` counts each sample's response tokens, and
    `prompt_lengths` holds the lengths of the different prompts. For each (epoch, version) that made tokens,
    `loss_tokens` has these two numbers and each sample's token count. `segments`, `lengths` and `reasons` hold the
    inside of JSON lists. `rollq.buffer.wire.frame_encoding` describes `empty_details`. `has_numbers` says whether a
    sample has reward parts or extra values. `prompts`, `ids` and `logprobs` hold the arrays of all samples, one after
    another.
    """

    rewards: list[float]
    temperatures: list[float]
    tokens: list[int]
    prompt_lengths: list[int]
    loss_tokens: list[tuple[int, ...]]
    segments: bytes
    lengths: bytes
    reasons: bytes
    empty_details: list[bytes | None]
    has_numbers: bool
    prompts: list[Any]
    ids: list[Any]
    logprobs: list[Any]
    prompt_tokens: int
    response_tokens: int


def scan(samples: Sequence[Sample]) -> Scan | None:
    """Check a group's samples as `check_group` does, and read the data for the group's frame and numbers; None unless
    the group is plain."""
    scanned = passes.scan(samples) if passes else None
    return Scan._make(scanned) if scanned else None


def segments_of(
    count: int, rows: Any, prompts: list[Int32Array], ids: Int32Array, logprobs: Float32Array
) -> tuple[tuple[Segment, ...], ...] | None:
    """The segments of each of `count` samples, from a frame's arrays and layout rows; None unless these are plain."""
    return passes.segments(count, rows, prompts, ids, logprobs) if passes else None
