"""The task of agents that run beside a worker, in tests that kill either, and the processes of such an agent."""

import sys
from pathlib import Path
from typing import Any

import psutil

RULES: dict[str, Any] = {
    "batch_groups": 4, "group_size": 1, "max_tokens": 4000, "partial_rollout": True, "max_staleness": 99,
    "max_deaths": 99, "max_tries": 99, "agent_loop": "harness", "judge": "support.harness_judge.exit_code",
}  # fmt: skip


def rules(*command: str, **options: Any) -> dict[str, Any]:
    """The task of an agent."""
    return {**RULES, "agent_options": {"command": command, "tool_parser": "hermes", **options}}


def agents_of(folder: Path) -> list[int]:
    """The processes that run the agent of a test."""
    program = [sys.executable, str(folder / "agent.py")]
    processes = psutil.process_iter(["cmdline"])
    return [process.pid for process in processes if (process.info["cmdline"] or [])[:2] == program]
