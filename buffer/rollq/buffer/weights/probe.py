"""Logprobs for a few prompts under published weights, and bit sums of these weights, which show a worker whether its
engine serves the same weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Self

import numpy as np
import orjson
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from rollq.buffer.errors import WeightsError
from rollq.buffer.values.rollouts import Float32Array, Int32Array

PROMPTS, PROMPT_TOKENS = 4, 24
MOST_PROMPTS, MOST_TOKENS = 64, 1024
TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.15}
"""The mean difference in nats that rounding may cause. Compared with float32, SmolLM2-135M differed by 0.008 nats in
float16 and by 0.076 in bfloat16; tiny random models in vLLM differed by at most 1e-6 in float32."""
QUANTIZED_TOLERANCE = 0.5
"""The same for dtypes that `TOLERANCES` lacks."""


class BitSums(NamedTuple):
    """A tensor's shape, and its values summed as bits: rounded to bfloat16 and read as 16-bit integers.

    There is one sum, or with three or more dimensions one sum per index of the first dimension, that is, per expert of
    a layer. The sums are the same on every device, and change with a single expert of many, which hardly affects
    logprobs.
    """

    shape: tuple[int, ...]
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Prompts int32 [T], logprobs float32 [T - 1] in nats for all tokens of each prompt except the first, and torch's
    name for the dtype of the forward pass that computed them (`bfloat16`). `sums` holds the parameters' bit sums, by
    their names in memory."""

    dtype: str
    prompts: Sequence[Int32Array]
    logprobs: Sequence[Float32Array]
    sums: Mapping[str, BitSums] = field(default_factory=dict)

    def encode(self) -> bytes:
        """JSON that `decode` reads."""
        prompts = [prompt.tolist() for prompt in self.prompts]
        logprobs = [values.tolist() for values in self.logprobs]
        sums = {name: tuple(values) for name, values in self.sums.items()}
        return orjson.dumps({"dtype": self.dtype, "prompts": prompts, "logprobs": logprobs, "sums": sums})

    @classmethod
    def decode(cls, raw: bytes) -> Self:
        """Decode a probe that `encode` wrote. Raises `WeightsError` for anything else."""
        try:
            probe = _Probe.model_validate_json(raw)
        except ValidationError as error:
            raise WeightsError(f"the probe of the weights cannot be read: {raw!r:.200}") from error
        if [len(prompt) for prompt in probe.prompts] != [len(values) + 1 for values in probe.logprobs]:
            raise WeightsError("the probe of the weights lacks a logprob for some of its tokens, or has too many")
        return cls(
            probe.dtype,
            [np.array(prompt, np.int32) for prompt in probe.prompts],
            [np.array(values, np.float32) for values in probe.logprobs],
            probe.sums,
        )


_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Prompt = Annotated[list[_Token], Field(max_length=MOST_TOKENS)]


class _Probe(BaseModel):
    dtype: str
    prompts: list[_Prompt] = Field(min_length=1, max_length=MOST_PROMPTS)
    logprobs: list[list[FiniteFloat]]
    sums: dict[str, BitSums] = Field(default_factory=dict)


def probe_prompts(vocabulary: int) -> list[Int32Array]:
    """The same prompts int32 [T] at every call, from the middle of a vocabulary, which has no special tokens."""
    rng = np.random.default_rng(0)
    low, high = vocabulary // 8, max(vocabulary // 2, 1)
    return [rng.integers(low, max(high, low + 1), PROMPT_TOKENS, dtype=np.int32) for _ in range(PROMPTS)]


def tolerance_of(*dtypes: str) -> float:
    """How far two forward passes with the same weights and these dtypes may differ on average, in nats."""
    return max(TOLERANCES.get(dtype, QUANTIZED_TOLERANCE) for dtype in dtypes)


def difference(expected: Sequence[Float32Array], found: Sequence[Float32Array]) -> float:
    """The mean distance between logprobs, in nats; infinity if some are missing or not finite."""
    if [len(values) for values in expected] != [len(values) for values in found]:
        return float("inf")
    mean = float(np.abs(np.concatenate(expected) - np.concatenate(found)).mean())
    return mean if np.isfinite(mean) else float("inf")


def wrong_tensors(expected: Mapping[str, BitSums], found: Mapping[str, BitSums]) -> list[str]:
    """The tensors whose sums differ; lists experts one by one. Tensors that one side lacks or has in another shape, as
    in a sharded model, cannot be compared.
    """
    return [
        f"{name}[{index}]" if len(tensor.shape) > 2 else name
        for name, tensor in expected.items()
        if name in found and found[name].shape == tensor.shape
        for index, (ours, other) in enumerate(zip(tensor.sums, found[name].sums, strict=False))
        if ours != other
    ]
