"""The agent loop for verifiers' episodes, over the gateway."""

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt, Sample
from rollq.environments.verifiers.other_python import require_verifiers
from rollq.environments.verifiers.runners import Runners, RunnerSettings, runners_of
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.loops import Rollout
from rollq.workers.gateway.harnesses.local import make_chooser
from rollq.workers.gateway.harnesses.remote import Outside, OutsideSettings, require_key
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.judging.environment import check_named


class VerifiersSettings(OutsideSettings):
    """`agent_options`; `env` sets the options that this class adds."""

    environment: dict[str, Any] = Field(description="data with which a runner opens the environment")
    python: str = Field(default="", description="Python interpreter that has verifiers; default: the worker's")
    runners: int = Field(default=2, ge=0, description="processes of this worker; 0: you start them")
    concurrent: int = Field(default=64, gt=0, description="concurrent episodes in one worker")
    variables: tuple[str, ...] = Field(default=(), description="environment variables of the worker that runners get")


@dataclass(frozen=True, slots=True)
class RunnerLoop(Outside):
    """Offers sessions to runners. Without `runners`, the user starts them."""

    sessions: int = 1
    runners: Runners | None = None

    async def run(self, rollout: Rollout) -> Sample:
        """See `AgentLoop.run`."""
        if self.runners is not None:
            self.runners.start()
        return await Outside.run(self, rollout)

    async def close(self) -> None:
        """End the runners."""
        if self.runners is not None:
            await self.runners.close()


def verifiers_loop(gateway: Gateway, **options: Any) -> RunnerLoop:
    """The loop from its `agent_options`. Raises `ConfigError`, and `ValidationError` for invalid options."""
    settings = VerifiersSettings(**options)
    runners = None
    if settings.runners:
        require_verifiers(settings.python)
        check_named(settings.variables)
        kept = {name: getattr(settings, name) for name in ("python", "runners", "concurrent", "variables")}
        runners = runners_of(gateway, RunnerSettings(taskset=settings.environment["taskset"], **kept))
    else:
        require_key("env_options.runners = 0")
    gateway.want()
    return RunnerLoop(
        settings=settings,
        gateway=gateway,
        chat_format=make_format(settings.tool_parser, settings.reasoning_parser),
        chosen=make_chooser(settings.calls),
        offers=gateway.offers if runners is None else runners.offers,
        facts={"environment": settings.environment},
        sessions=settings.concurrent,
        runners=runners,
    )


async def unrewarded(prompt: Prompt, sample: Sample) -> float:
    """The judge for samples without a runner's reward: they fail."""
    raise SampleFailed(FailureKind.PROGRAM, "the runner set no reward before the session ended (session_timeout_s)")
