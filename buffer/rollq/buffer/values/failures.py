"""The kinds of sample failures. Failures are counted, and never become a reward of 0."""

from enum import StrEnum

from rollq.buffer.errors import RollqError


class FailureKind(StrEnum):
    """The part at which a sample failed. Metrics, queries and the archive use these values."""

    PROMPT = "prompt"  # the prompt is malformed or too long
    PROVIDER = "provider"  # the engine, or its servers
    CONTEXT = "context"  # no room for another token, in a loop that cannot end its answer there
    GRADER = "grader"  # the judge raised, hung, or returned no finite number
    SANDBOX = "sandbox"  # the place where an answer's program or tests run
    TOOL = "tool"  # a tool that the model called broke
    ENVIRONMENT = "environment"  # the environment, or its server
    PROGRAM = "program"  # the agent loop, or the program that owns it


class SampleFailed(RollqError):
    """Fails one sample, with a kind and a reason. Agent loops, environments, tools and judges raise it."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
