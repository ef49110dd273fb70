"""An OpenEnv server's episodes as environments for rollq's loop.

Invariant: a model's mistake is counted, and answered with a message or a reward of 0. A server's fault fails only the
episode's sample, with the kind `environment` and without a reward. A lost session is never continued, since its state
is gone.
"""

from collections.abc import Mapping
from typing import Any

from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import Prompt
from rollq.environments.episodes import OPENING, check_opening, place_of
from rollq.environments.openenv.options import EpisodeOptions
from rollq.environments.openenv.schemas import only_field
from rollq.environments.openenv.server import NoRoute, Server, server_at
from rollq.environments.openenv.session import Session, SessionLost
from rollq.environments.openenv.templates import NoSuchField, NotAnAction, make_action, plain, render
from rollq.environments.openenv.tools import LIST_TOOLS, answer_of, call_of, definitions, is_mistaken
from rollq.environments.openenv.wire import INVALID_ACTION, Observation, Refused, Unreadable
from rollq.workers.agents.conversation import Message
from rollq.workers.agents.environments import Opening, Step
from rollq.workers.agents.tool_calls import Malformed, ToolCall
from rollq.workers.agents.turns import Turn, answer


class ServerEpisode:
    """One session with a server, for a row's episode."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = EpisodeOptions(**options)
        self._server: Server | None = None
        self._session: Session | None = None

    @property
    def waits_for(self) -> str:
        """Why the server has no place for the episode yet; empty once it has one."""
        return "" if self._server is None or self._session is not None else self._server.refusal

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """Wait for a place, and open the row's episode. The opening is already in the row's prompt."""
        place = place_of(prompt)
        try:
            opened = await self.open(place)
            text = self.text_of(opened)
        except (Refused, Unreadable, NoSuchField) as error:
            raise self._failed(error) from error
        if opened.done:
            raise SampleFailed(FailureKind.ENVIRONMENT, f"{self._url}: the episode was over when it opened")
        check_opening(place, text)
        return Opening()

    async def teardown(self) -> None:
        """Close the session, which frees its place on the server."""
        session, self._session = self._session, None
        if session is not None:
            assert self._server is not None
            try:
                await session.close()
            finally:
                self._server.free()

    async def open(self, place: Mapping[str, Any]) -> Observation:
        """Wait for a place, open an episode, and return its first observation. Raises `Refused` and `Unreadable`."""
        self._server = server_at(self._url)
        data = {**self._options.reset, **{name: value for name, value in place.items() if name != OPENING}}
        return await self._server.place(lambda: self._connect(data))

    def text_of(self, observation: Observation) -> str:
        """An observation for the model. Raises `NoSuchField`."""
        template = self._options.observation
        return render(template, observation.fields) if template else plain(observation.fields)

    async def begin(self, session: Session, data: Mapping[str, Any]) -> Observation:
        """Open the episode in a new session."""
        return await session.ask("reset", data)

    async def act(self, action: Mapping[str, Any]) -> Observation | Step:
        """Return the server's answer to an action, or the step for a refused action. Raises `SampleFailed`."""
        assert self._session is not None
        try:
            return await self._session.ask("step", action)
        except Refused as error:
            if error.code != INVALID_ACTION:
                raise self._failed(error) from error
            return self.invalid(error.message)
        except (Unreadable, SessionLost) as error:
            raise self._failed(error) from error

    def invalid(self, problem: str) -> Step:
        """The step for a turn without a valid action."""
        if self._options.invalid == "end":
            return Step(done=True, reward=0.0, invalid=1)
        return Step(({"role": "user", "content": f"error: {problem}"},), invalid=1)

    async def _connect(self, data: Mapping[str, Any]) -> Observation:
        """Connect and open the episode. If that fails, close the connection."""
        session = await Session.connect(self._url)
        try:
            opened = await self.begin(session, data)
        except BaseException:
            await session.close()
            raise
        self._session = session
        return opened

    def _failed(self, error: Exception) -> SampleFailed:
        return SampleFailed(FailureKind.ENVIRONMENT, f"{self._url}: {error}")


class Episode(ServerEpisode):
    """An episode whose observations and actions are strings."""

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """See `ServerEpisode.setup`."""
        opening = await super().setup(prompt, session)
        try:
            self._action = self._options.action or only_field(await server_at(self._url).action_schema())
        except (NoRoute, NoSuchField, SessionLost) as error:
            raise self._failed(error) from error
        return opening

    async def step(self, text: str) -> Step:
        """Send the model's text as an action."""
        try:
            action = make_action(self._action, text)
        except NotAnAction as error:
            return self.invalid(str(error))
        answered = await self.act(action)
        if isinstance(answered, Step):
            return answered
        try:
            messages = () if answered.done else ({"role": "user", "content": self.text_of(answered)},)
        except NoSuchField as error:
            raise self._failed(error) from error
        return Step(messages, answered.done, answered.reward)


class ToolEpisode(ServerEpisode):
    """An episode in which the model calls the environment's tools. A turn without a call ends the episode."""

    async def setup(self, prompt: Prompt, session: str) -> Opening:
        """See `ServerEpisode.setup`; the model gets the tools."""
        await super().setup(prompt, session)
        return Opening(tools=self._tools)

    async def begin(self, session: Session, data: Mapping[str, Any]) -> Observation:
        """List the tools, and open the episode."""
        self._tools = definitions(await session.ask("step", LIST_TOOLS))
        return await super().begin(session, data)

    async def respond(self, turn: Turn) -> Step:
        """Run the calls of a turn one after another. Their rewards add up to the turn's reward."""
        steps: list[Step] = []
        messages: list[Message] = []
        for call in turn.calls:
            step = self.invalid(call.problem) if isinstance(call, Malformed) else await self._called(call)
            steps.append(step)
            messages += [answer(turn, call, each["content"], verbatim=False) for each in step.messages]
            if step.done:
                break
        rewards = [step.reward for step in steps if step.reward is not None]
        return Step(
            tuple(messages),
            done=not steps or steps[-1].done,
            reward=sum(rewards) if rewards else None,
            invalid=sum(step.invalid for step in steps),
        )

    async def _called(self, call: ToolCall) -> Step:
        answered = await self.act(call_of(call.name, call.arguments))
        if isinstance(answered, Step):
            return answered
        try:
            content = answer_of(answered)
        except Unreadable as error:
            raise self._failed(error) from error
        return Step(
            ({"role": "tool", "content": content},), answered.done, answered.reward, invalid=int(is_mistaken(answered))
        )
