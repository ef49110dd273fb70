"""Settings of a session: `agent_options` of the loops over the gateway."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from rollq.buffer.rules.settings import Settings
from rollq.workers.gateway.sessions.asked_calls import SessionLimits


class SessionSettings(Settings):
    """`agent_options` that all loops over the gateway have."""

    tool_parser: str = Field(
        default="auto", description="how the model writes calls; auto: as the family of its chat template does"
    )
    reasoning_parser: str = Field(default="", description="how the model writes thoughts: one of vLLM's parsers")
    calls: str = Field(
        default="all", description="calls that are trained: all, or the dotted path of a function that chooses them"
    )
    max_calls: int = Field(default=256, gt=0, description="most calls in a session")
    max_made_tokens: int = Field(default=0, ge=0, description="most tokens that a session makes; 0: no limit")
    parallel_calls: int = Field(default=8, gt=0, description="calls of a session at the same time; others wait")

    REMOVED: ClassVar[Mapping[str, str]] = {
        "repeat_s": "a call whose client has lost its connection continues for 60 s; leave it out"
    }

    @property
    def limits(self) -> SessionLimits:
        """The session's limits."""
        return SessionLimits(self.max_calls, self.max_made_tokens, self.parallel_calls)
