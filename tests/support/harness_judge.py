"""A judge of agents that are processes."""

from pathlib import Path
from typing import Any


def exit_code(prompt: Any, sample: Any) -> float:
    """1 if the command ended well, and its workspace is still there."""
    facts = sample.extra["harness"]
    return float(facts["exit_code"] == 0 and Path(facts["workspace"]).is_dir())
