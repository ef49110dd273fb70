"""Settings of the gateway, `[worker.gateway]`, and of a session, in `agent_options`."""

from pydantic import Field

from rollq.buffer.rules.settings import Settings
from rollq.workers.gateway.sessions.session import SessionLimits


class GatewaySettings(Settings):
    """Where the gateway of a worker listens."""

    bind: str = Field(
        default="127.0.0.1:0",
        pattern=r"^.+:\d{1,5}$",
        description="address and port of the gateway; port 0: a free one",
    )
    url: str = Field(
        default="", description="URL at which agents elsewhere reach the gateway; default: the address of bind"
    )
    max_body_mb: float = Field(default=16, gt=0, description="largest request, in megabytes")


class SessionSettings(Settings):
    """`agent_options` that all loops over the gateway have."""

    tool_parser: str = Field(
        default="auto", description="how the model writes calls; auto: as the family of its chat template does"
    )
    reasoning_parser: str = Field(default="", description="how the model writes thoughts: one of vLLM's")
    calls: str = Field(
        default="all", description="calls that are trained: all, or the dotted path of a function that says so of each"
    )
    max_calls: int = Field(default=256, gt=0, description="most calls in a session")
    max_made_tokens: int = Field(default=0, ge=0, description="tokens after which a session makes no more; 0: no limit")
    parallel_calls: int = Field(default=8, gt=0, description="calls of a session at the same time; others wait")
    repeat_s: float = Field(
        default=60, ge=0, description="seconds that a call continues whose client has lost its connection"
    )

    @property
    def limits(self) -> SessionLimits:
        """The limits of a session."""
        return SessionLimits(self.max_calls, self.max_made_tokens, self.parallel_calls, self.repeat_s)
