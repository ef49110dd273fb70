"""The parts that compose a loss, by name."""

from typing import Literal

Aggregation = Literal["token", "sequence", "constant"]
Surrogate = Literal[
    "clipped", "gmpo", "cispo", "sapo", "dppo_tv", "dppo_kl", "ipo", "topr", "unclipped", "rec", "custom"
]
RatioLevel = Literal["token", "sequence"]
OldLogprobs = Literal["behaviour", "recomputed"]
Correction = Literal["none", "full", "truncated", "masked"]
Mask = Literal["none", "geometric", "opsm"]
Kl = Literal["k2", "k3", "k3_unbiased", "k3_by_k2", "reward"]
