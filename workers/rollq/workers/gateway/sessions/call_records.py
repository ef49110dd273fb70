"""Stores recorded calls as segments of a sample in the buffer. Pure.

Until a sample is finished, each segment holds one call, in the order of the answers. A segment's prompt holds only the
tokens that the call added to its parent's, and the array `call` holds the other facts. The prompt is never empty: when
samples are stored in parts, a segment without a prompt continues the segment before it. If the call adds no tokens, the
prompt holds one token that is not counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson

from rollq.buffer.errors import CorruptFrame
from rollq.buffer.values.rollouts import FinishReason, Int32Array, Segment
from rollq.workers.engines.protocol import Completion

CALL = "call"
"""The name of the array with the facts about a call, as JSON in bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedCall:
    """One answered call: its `number` in the session, its request's `digest`, the tokens `delta` int32 [D] that it
    added, and the model's answer."""

    number: int
    digest: bytes
    delta: Int32Array
    completion: Completion
    created_s: int

    @property
    def segment(self) -> Segment:
        """The call as a segment."""
        facts = {
            "number": self.number,
            "digest": self.digest.hex(),
            "finish_reason": self.completion.finish_reason.value,
            "created_s": self.created_s,
            "added": len(self.delta),
        }
        made = self.completion
        arrays: dict[str, npt.NDArray[Any]] = {**made.arrays, CALL: np.frombuffer(orjson.dumps(facts), np.uint8)}
        prompt = self.delta if len(self.delta) else np.zeros(1, np.int32)
        return Segment(prompt, made.ids, made.logprobs, made.versions, arrays=arrays)

    @classmethod
    def of(cls, segment: Segment) -> Self | None:
        """The call in a segment; None for another agent loop's segment. Raises `CorruptFrame`."""
        if CALL not in segment.arrays:
            return None
        try:
            facts: Mapping[str, Any] = orjson.loads(np.asarray(segment.arrays[CALL]).tobytes())
            arrays = {name: np.asarray(array) for name, array in segment.arrays.items() if name != CALL}
            reason = FinishReason(facts["finish_reason"])
            made = Completion(segment.response_ids, segment.logprobs, segment.versions, reason, arrays)
            delta = segment.prompt_ids[: facts["added"]]
            return cls(facts["number"], bytes.fromhex(facts["digest"]), delta, made, facts["created_s"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFrame(f"a segment is not a recorded call: {error!r}") from error
