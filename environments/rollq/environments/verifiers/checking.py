"""The faults in trials of episodes without a model. Pure."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from statistics import mean, median
from typing import Any, Final

from rollq.environments.kinds import Finding, Level

TRIED: Final = 16
"""How many rows' episodes are tried."""
SOLVED: Final = 1.0
"""A reward that counts as solved in verifiers."""


def findings(tried: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Faults in the outcomes that a runner has written."""
    for trial in tried:
        outcomes = trial["outcomes"]
        yield from _failures(outcomes)
        yield from _rewards(outcomes)
        if trial["left"]:
            yield Finding(Level.ERROR, f"{trial['left']} processes remain after the episodes")


def _failures(outcomes: list[Mapping[str, Any]]) -> Iterator[Finding]:
    reasons: Counter[str] = Counter()
    first: dict[str, int] = {}
    for row, outcome in enumerate(outcomes):
        if outcome["path"] == "/fail":
            reason = f"{outcome['body']['kind']}: {outcome['body']['reason']}"
            reasons[reason] += 1
            first.setdefault(reason, row)
    for reason, count in reasons.items():
        yield Finding(Level.ERROR, f"{count} of {len(outcomes)} episodes fail: {reason}", first[reason])


def _rewards(outcomes: list[Mapping[str, Any]]) -> Iterator[Finding]:
    rewards = [outcome["body"]["reward"] for outcome in outcomes if outcome["path"] == "/reward"]
    if not rewards:
        return
    took = f"{median(outcome['seconds'] for outcome in outcomes):.2g} s"
    yield Finding(
        Level.NOTE, f'the answer "0" earns {mean(rewards):g} on average; an episode takes {took} without a model'
    )
    if min(rewards) >= SOLVED:
        yield Finding(Level.WARNING, f'the answer "0" earns at least {min(rewards):g} in each of {len(rewards)} rows')
