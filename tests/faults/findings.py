"""What fuzzing has found."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """An input that was not treated as it should have been. `verdict` is crash, wrongly accepted, half done, or
    hangs."""

    target: str
    verdict: str
    given: Any
    message: str


@dataclass
class Tally:
    """What became of the inputs of one target: how many ended with each verdict, and those that are findings."""

    target: str
    verdicts: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, verdict: str, given: Any = None, message: str = "") -> None:
        """Count an input. It is a finding if there is a message."""
        self.verdicts[verdict] += 1
        if message:
            self.findings.append(Finding(self.target, verdict, given, message))
