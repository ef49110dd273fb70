"""Losses of other projects on one input, from tests/data/losses, as 1-D tensors over its loss tokens."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "data" / "losses"


@dataclass(frozen=True)
class Inputs:
    """The input, float64 [18] each, and the padded mask bool [4, 6]."""

    new: torch.Tensor
    old: torch.Tensor
    behaviour: torch.Tensor
    reference: torch.Tensor
    advantages: torch.Tensor
    samples: torch.Tensor
    sample_tokens: torch.Tensor
    mask: torch.Tensor

    def flat(self, padded: Any) -> torch.Tensor:
        """The loss tokens of values [4, 6]."""
        return torch.tensor(padded, dtype=torch.float64)[self.mask]


@cache
def cases(file: str) -> dict[str, Any]:
    """Name -> case of a file."""
    return {case["name"]: case for case in json.loads((FOLDER / file).read_text())["cases"]}


def inputs(file: str = "trl_grpo.json") -> Inputs:
    """The input, the same in all files; `new` takes gradients."""
    data = json.loads((FOLDER / file).read_text())["inputs"]
    mask = torch.tensor(data["mask"], dtype=torch.bool)
    row = torch.arange(4)[:, None].expand(4, 6)[mask]
    values = {
        name: torch.tensor(data[name], dtype=torch.float64)[mask] for name in ("new", "old", "behaviour", "reference")
    }
    return Inputs(
        **{**values, "new": values["new"].requires_grad_()},
        advantages=torch.tensor(data["advantages"], dtype=torch.float64)[row],
        samples=row,
        sample_tokens=mask.sum(1).double()[row],
        mask=mask,
    )
