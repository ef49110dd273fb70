"""Environments answer the model in multi-turn conversations. Each sample gets a new environment.

Invariant: an environment whose `setup` has started is torn down when the sample ends, fails, is aborted or loses its
lease, and when the worker stops. The teardown takes at most `TEARDOWN_S`. If it fails, the error is only logged.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, TypeVar, runtime_checkable

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.turns import Turn
from rollq.workers.user_code.calls import contained, within
from rollq.workers.user_code.errors import what_happened

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Opening:
    """The start of a conversation: messages after the prompt's, and tool definitions for the model."""

    messages: tuple[Message, ...] = ()
    tools: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to one turn of the model: messages for the next turn, or `done`.

    `reward` is the turn's reward, None for a turn without a reward. The sample keeps all rewards for the judge
    `environment`, which counts a missing reward as 0 if other turns have rewards. `truncated` is true if the
    environment cut the episode off; the sample then ends with the finish reason `length`. `invalid` counts the turn's
    actions that the environment did not accept; the sample has the sum over all turns as `invalid_actions`.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    reward: float | None = None
    truncated: bool = False
    invalid: int = 0


class Environment(Protocol):
    """The model's partner in one conversation. All methods run on the worker's event loop and must not block it.

    The class is called with the options of the settings. Its constructor acquires no resources.
    """

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Get ready. `session` is unique to this attempt at this sample."""

    async def step(self, text: str) -> Step:
        """Answer the model's turn. An exception fails the sample."""

    async def teardown(self) -> None:
        """Release all resources. Called once, even if `setup` failed or was interrupted."""


@runtime_checkable
class TurnEnvironment(Protocol):
    """An environment that reads the thoughts, content and calls of the model's turns instead of the text."""

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """See `Environment.setup`."""

    async def respond(self, turn: Turn) -> Step:
        """Answer the model's turn. An exception fails the sample."""

    async def teardown(self) -> None:
        """See `Environment.teardown`."""


AnyEnvironment = Environment | TurnEnvironment


@runtime_checkable
class ResumableEnvironment(Protocol):
    """An environment that can continue another environment's conversation after its worker was killed or
    interrupted."""

    async def resume(self, prompt: Prompt, session: str, messages: Sequence[Message]) -> Opening:
        """Get ready for the turn after `messages`; called instead of `setup`. `messages` holds everything since the
        opening, from the model and the other environment. Returns the same opening as the other environment did."""


TEARDOWN_S = 10.0
"""Longest time for a teardown, in seconds."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the model's turns in one sample, and on the times for setup and step, in seconds. None means no
    limit."""

    max_turns: int
    setup_s: float | None = None
    step_s: float | None = None


Unfinished = float | Literal["fail", "judge"]
"""The reward of a sample that runs out of turns or tokens before it has a reward: a number, "fail" (the sample fails),
or "judge" (only its judge rewards it)."""


@dataclass(frozen=True, slots=True)
class Environments:
    """One task's environments. `resumable` environments can `resume`. If they `give_rewards`, their steps have rewards,
    and a number in `unfinished` is a step's reward. Otherwise, that number is the sample's reward."""

    make: Callable[[], AnyEnvironment]
    limits: Limits
    resumable: bool = False
    give_rewards: bool = True
    unfinished: Unfinished = 0.0

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AnyEnvironment]:
        """Yield a new environment, and tear it down at the end."""
        environment = self._made()
        try:
            yield environment
        finally:
            await tear_down(environment, TEARDOWN_S)

    def _made(self) -> AnyEnvironment:
        try:
            return self.make()
        except SampleFailed:
            raise
        except Exception as error:
            raise _broken(f"the environment: {what_happened(error)}") from error

    async def setup(self, environment: AnyEnvironment, prompt: Prompt, session: str) -> Opening:
        """See `Environment.setup`. Raises `SampleFailed` with the step's name and the environment's text `waits_for`,
        if any. The error's kind is `environment` unless the environment raises `SampleFailed` itself."""
        setup = environment.setup(prompt, session)
        waits_for = partial(getattr, environment, "waits_for", "")
        what = "the environment's setup"
        return _checked(await _within(self.limits.setup_s, what, setup, waits_for), Opening, what)

    async def resume(
        self, environment: AnyEnvironment, prompt: Prompt, session: str, messages: Sequence[Message]
    ) -> Opening:
        """See `ResumableEnvironment.resume`. Raises `SampleFailed` as `setup` does."""
        assert isinstance(environment, ResumableEnvironment)
        resuming = environment.resume(prompt, session, messages)
        what = "the environment's resume"
        return _checked(await _within(self.limits.setup_s, what, resuming), Opening, what)

    async def step(self, environment: AnyEnvironment, turn: Turn, text: str) -> Step:
        """See `TurnEnvironment.respond`, and `Environment.step`, which receives `text`. Raises `SampleFailed` as
        `setup` does."""
        step = environment.respond(turn) if isinstance(environment, TurnEnvironment) else environment.step(text)
        what = "a step of the environment"
        return _checked(await _within(self.limits.step_s, what, step), Step, what)


async def tear_down(environment: AnyEnvironment, limit_s: float) -> None:
    """Tear the environment down, then raise a cancellation that arrived during the teardown. Abandon a teardown that
    takes longer than `limit_s`."""
    loop = asyncio.get_running_loop()
    ending = asyncio.ensure_future(contained(environment.teardown()))
    ending.add_done_callback(_log_failure)
    deadline_s = loop.time() + limit_s
    cancelled: asyncio.CancelledError | None = None
    while not ending.done() and (left_s := deadline_s - loop.time()) > 0:
        try:
            await asyncio.wait([ending], timeout=left_s)
        except asyncio.CancelledError as error:
            cancelled = error
    if not ending.done():
        log.warning("an environment was not torn down within %g s", limit_s)
        ending.cancel()
    if cancelled is not None:
        raise cancelled


def _log_failure(ending: "asyncio.Task[None]") -> None:
    if not ending.cancelled() and (error := ending.exception()) is not None:
        log.warning("an environment could not be torn down", exc_info=error)


async def _within(limit_s: float | None, what: str, work: Awaitable[T], waits_for: Callable[[], str] = lambda: "") -> T:
    try:
        return await within(limit_s, work)
    except SampleFailed:
        raise
    except Exception as error:
        if isinstance(error, TimeoutError) and not str(error):
            waiting = waits_for()
            raise _broken(f"{what} took longer than {limit_s:g} s" + (f": {waiting}" if waiting else "")) from error
        raise _broken(f"{what}: {what_happened(error)}") from error


def _checked(made: object, kind: type[T], what: str) -> T:
    if not isinstance(made, kind):
        raise _broken(f"{what} returned {made!r:.80}; expected {kind.__name__}")
    return made


def _broken(problem: str) -> SampleFailed:
    return SampleFailed(FailureKind.ENVIRONMENT, problem)
