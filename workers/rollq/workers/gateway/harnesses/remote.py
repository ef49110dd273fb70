"""The agent loop `outside`: a harness elsewhere asks the worker for a session, and calls the model through that
session."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, ClassVar, Final

from pydantic import Field

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Sample
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.loops import Rollout, check_length, failed
from rollq.workers.agents.turns import ChatFormat
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.gateway.harnesses.given import about, given_prompt
from rollq.workers.gateway.harnesses.local import make_chooser
from rollq.workers.gateway.offers import Offer, Offers
from rollq.workers.gateway.open_sessions import KEY_VARIABLE, Gateway, new_token
from rollq.workers.gateway.session_settings import SessionSettings
from rollq.workers.gateway.sessions.finished_sample import Chooser
from rollq.workers.gateway.sessions.session import Session

LOOK_S: Final = 0.2


class OutsideSettings(SessionSettings):
    """`agent_options` of the loop `outside`."""

    session_timeout_s: float = Field(default=600, gt=0, description="longest session, in seconds, once it was taken")
    starting_s: float = Field(default=600, gt=0, description="seconds until the first call, after which a session ends")
    idle_s: float = Field(default=300, gt=0, description="seconds without a further call after which a session ends")


@dataclass(frozen=True, slots=True)
class Outside:
    """Waits for a harness to take each sample. An interrupted sample is offered again, and repeated calls get their
    recorded answers. `offers` belongs to the gateway or to a program; `facts` holds further facts for the harness."""

    settings: OutsideSettings
    gateway: Gateway
    chat_format: ChatFormat
    chosen: Chooser | None
    offers: Offers
    facts: Mapping[str, Any] = field(default_factory=dict)
    resumable: ClassVar[bool] = True
    records: ClassVar[bool] = True

    @property
    def is_offered(self) -> bool:
        """Whether sessions are offered to programs elsewhere."""
        return self.offers is self.gateway.offers

    async def close(self) -> None:
        """Release the resources that all samples share."""

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise `ConfigError` if the loop cannot parse turns with this tokenizer."""
        self.chat_format.check(tokenizer)

    async def run(self, rollout: Rollout) -> Sample:
        """See `AgentLoop.run`."""
        check_length(rollout)
        prompt = given_prompt(rollout.prompt)
        session = Session(rollout, self.chat_format, self.settings.limits, self.chosen)
        token, reward_token = new_token(), new_token()
        with self.gateway.serving(session, token=token, reward_token=reward_token):
            try:
                facts = {
                    "prompt": prompt,
                    **about(rollout),
                    **self.facts,
                    **self.gateway.addresses(token),
                    "reward_token": reward_token,
                    "deadline_s": self.settings.session_timeout_s,
                }
                offer = Offer(rollout.task, facts, lambda: session.calls.is_over, session.close)
                with self.offers.offering(offer):
                    await _until(offer.taken, rollout, session.closed.is_set)
                ended = await self._until_closed(rollout, session)
                await session.settle()
            finally:
                await session.stop()
        if (stopped := session.stopped_sample()) is not None:
            return stopped
        made = session.sample(extra={"harness": {"ended": ended}})
        if ended in ("starting", "idle"):
            which = "no call" if ended == "starting" else "no further call"
            limit_s = getattr(self.settings, f"{ended}_s")
            return replace(failed(f"the program made {which} for {limit_s:g} s ({ended}_s)"), extra=made.extra)
        return session.ended(made, out_of_time=ended == "timeout")

    async def _until_closed(self, rollout: Rollout, session: Session) -> str:
        """Wait until the session is closed, is idle for too long, or its time is up. Returns which of these
        happened."""
        begun_s, limits = monotonic(), self.settings

        def ended() -> str:
            if session.closed.is_set():
                return "closed"
            if monotonic() - begun_s >= limits.session_timeout_s:
                return "timeout"
            if session.calls.used_s is None:
                return "starting" if monotonic() - begun_s >= limits.starting_s else ""
            is_idle = not session.calls.is_busy and monotonic() - session.calls.used_s >= limits.idle_s
            return "idle" if is_idle else ""

        await _until(session.closed, rollout, lambda: bool(ended()))
        return ended()


async def _until(event: asyncio.Event, rollout: Rollout, is_over: Callable[[], bool]) -> None:
    """Wait for an event, until `is_over` returns True or the group is being stopped."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        while not (waiting.done() or rollout.is_stopped() or is_over()):
            await asyncio.wait([waiting], timeout=LOOK_S)
    finally:
        waiting.cancel()


def outside_loop(gateway: Gateway, **options: Any) -> Outside:
    """The loop `outside` from its `agent_options`. Raises `ConfigError`, and `ValidationError` for invalid options."""
    settings = OutsideSettings(**options)
    require_key("agent loop 'outside'")
    gateway.want()
    chat_format = make_format(settings.tool_parser, settings.reasoning_parser)
    return Outside(settings, gateway, chat_format, make_chooser(settings.calls), gateway.offers)


def require_key(who: str) -> None:
    """Raise `ConfigError` if there is no key with which programs elsewhere ask for sessions. `who` names what needs the
    key."""
    if not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"{who} needs {KEY_VARIABLE} in the worker's environment: set it to a secret "
            "of your choice, which programs send when they ask for a session"
        )
