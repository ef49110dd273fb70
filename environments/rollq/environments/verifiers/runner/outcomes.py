"""The outcome of an episode in verifiers for its session: rewards or a failure. Pure."""

import math
from typing import Any

from verifiers.v1.episode import Episode
from verifiers.v1.trace import Error, Trace

from rollq.environments.verifiers.runner.inside import OVERFLOW

KINDS = {
    "ProviderError": "provider",
    "HarnessError": "program",
    "SandboxError": "sandbox",
    "ToolsetError": "tool",
    "EnvError": "environment",
    "InterceptionError": "program",
    "TunnelError": "program",
}
"""verifiers' error -> the kind of failure."""
MOST_REASON = 2000

Outcome = tuple[str, dict[str, Any]]
"""The path below a session's URL, and the body."""


def failure(kind: str, reason: str) -> Outcome:
    """The outcome of a sample that fails."""
    return "/fail", {"kind": kind, "reason": reason[-MOST_REASON:] or "no reason was given"}


def outcome_of(episode: Episode[Any, Any, Any], seat: str) -> Outcome:
    """The outcome of an episode with the trained seat `seat`."""
    traces = (
        [trace for trace in episode.traces if trace.agent.name == seat]
        if len(episode.traces) > 1
        else [*episode.traces]
    )
    if not episode.ok:
        return _failed(episode)
    if len(traces) != 1:
        return failure("program", f"the episode played the seat {seat} {len(traces)} times, but a sample trains one")
    return _rewarded(traces[0])


def _failed(episode: Episode[Any, Any, Any]) -> Outcome:
    broken = [trace for trace in episode.traces if not trace.ok and trace.errors]
    error: Error | None = broken[-1].errors[-1] if broken else episode.last_error
    if error is None:
        return failure("program", "the episode failed without an error")
    is_scored = bool(broken and broken[-1].timing.scoring.start)
    return failure(kind_of(error.type, error.message, is_scored=is_scored), f"{error.type}: {error.message}")


def kind_of(error: str, message: str, *, is_scored: bool = False) -> str:
    """The failure kind of an error in verifiers. `is_scored` is true if the error followed the computation of
    rewards."""
    if error == "TaskError":
        return "grader" if is_scored else "environment"
    if error == "ProviderError" and OVERFLOW in message:
        return "context"
    return KINDS.get(error, "program")


def _rewarded(trace: Trace[Any, Any, Any]) -> Outcome:
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        return _unrewarded(trace, missing)
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    if wrong := [name for name, part in parts.items() if not math.isfinite(part)]:
        return failure("grader", f"these rewards are not finite: {', '.join(wrong)}")
    return "/reward", {
        "reward": math.fsum(parts.values()),
        "parts": parts if len(parts) > 1 else {},
        "truncated": is_truncated(trace),
        "extra": {
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
            **({"stop": trace.stop_condition} if trace.stop_condition else {}),
        },
    }


def _unrewarded(trace: Trace[Any, Any, Any], missing: list[str]) -> Outcome:
    said = f"these rewards were not computed: {', '.join(missing)}" if missing else "the task gave no reward"
    return failure("grader", said + (f" ({trace.stop_condition})" if trace.stop_condition else ""))


def is_truncated(trace: Trace[Any, Any, Any]) -> bool:
    """Whether a limit on turns, tokens, time or context has ended the episode."""
    last = trace.calls[-1].error if trace.calls else None
    return bool(trace.is_truncated or trace.is_timeout or (last is not None and OVERFLOW in last.message))
