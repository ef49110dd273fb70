"""Losses by name: the settings that differ from the defaults of `LossSettings`. Pure values.

Values come from the paper or from its authors' code; docs/guide/losses.md names the source of each.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ppo": {},
        "grpo": {"aggregation": "sequence"},
        "dapo": {"clip_high": 0.28},
        "dr_grpo": {"aggregation": "constant"},
        "gspo": {"ratio": "sequence", "aggregation": "sequence", "clip_low": 3e-4, "clip_high": 4e-4},
        "gmpo": {"surrogate": "gmpo", "aggregation": "sequence", "clip_low": 0.4, "clip_high": 0.4},
        "cispo": {"surrogate": "cispo", "ratio_cap": 5.0},
        "sapo": {"surrogate": "sapo", "aggregation": "sequence"},
        "decoupled_ppo": {"old_logprobs": "recomputed", "correction": "full"},
        "decoupled_tis": {"old_logprobs": "recomputed", "correction": "truncated", "importance_cap": 2.0},
        "icepop": {
            "old_logprobs": "recomputed",
            "correction": "masked",
            "importance_floor": 0.5,
            "importance_cap": 5.0,
        },
        "mis": {
            "old_logprobs": "recomputed",
            "correction": "masked",
            "correction_level": "sequence",
            "importance_floor": 0.0,
            "importance_cap": 3.0,
        },
        "geometric_mis": {
            "old_logprobs": "recomputed",
            "correction": "truncated",
            "importance_cap": 2.0,
            "mask": "geometric",
        },
        "dppo_tv": {"surrogate": "dppo_tv", "trust_low": 0.15, "trust_high": 0.15, "ratio_cap": 20.0},
        "dppo_kl": {"surrogate": "dppo_kl", "trust_low": 0.05, "trust_high": 0.05, "ratio_cap": 20.0},
        "ipo": {"surrogate": "ipo", "trust_low": 0.2, "trust_high": 0.2},
        "topr": {"surrogate": "topr"},
        "reinforce": {"surrogate": "unclipped"},
        "rec": {"surrogate": "rec"},
    }
)
"""Name of a loss -> its settings."""
