"""The multi-turn agent loop: the model and an environment take turns until one of them ends the conversation.

Invariant: `Sampling.max_tokens` bounds all tokens after the prompt, from the model and from the environment. A sequence
has at most `max_prompt_tokens` plus `max_tokens` tokens, even after a changed prefix has started a new segment.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, ValidationError

from rollq.buffer.common.mappings import filled
from rollq.buffer.common.means import present
from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import ENVIRONMENT, TURN_ENVIRONMENT, check_object
from rollq.buffer.errors import ConfigError
from rollq.buffer.rewards.credit import TURN_REWARDS
from rollq.buffer.rules.settings import Settings
from rollq.buffer.values.failures import FailureKind, SampleFailed
from rollq.buffer.values.rollouts import FinishReason, Prompt, Sample, SampleStatus
from rollq.workers.agents.chat_formats import make_format
from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.agents.environments import AnyEnvironment, Environments, Limits, Opening, ResumableEnvironment, Step
from rollq.workers.agents.loops import Rollout, check_length, failed, finish
from rollq.workers.agents.turns import ChatFormat, Turn, forms
from rollq.workers.engines.protocol import Completion, ContextFull, Request, Tokenizer, parse_reason
from rollq.workers.seeds import turn_seed
from rollq.workers.user_code.real_numbers import finite

FiniteNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class EnvironmentSettings(Settings):
    """`agent_options` of the loop `environment`."""

    environment: str = Field(description="dotted path of a class (see rollq.workers.agents.environments.Environment)")
    options: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")
    max_turns: int = Field(default=8, gt=0, description="turns of the model in one sample")
    tool_parser: str = Field(default="", description="how the model writes calls: auto, or the name of a format")
    reasoning_parser: str = Field(default="", description="how the model writes thoughts: one of vLLM's parsers")
    unfinished: FiniteNumber | Literal["fail"] = Field(
        default=0.0, description="reward of a sample that runs out of turns or tokens before it has one; or fail"
    )
    concurrent: int = Field(default=256, gt=0, description="environments at the same time, in one worker")
    setup_timeout_s: float = Field(default=60.0, gt=0, description="longest time for setting up an environment")
    step_timeout_s: float = Field(default=60.0, gt=0, description="longest step")

    REMOVED: ClassVar[Mapping[str, str]] = {"teardown_timeout_s": "a teardown may take 10 s; leave it out"}


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Several turns with an environment. An interrupted sample continues after its last complete turn if a new
    environment can resume; otherwise it starts again. `closing` holds functions to call when the worker ends."""

    environments: Environments
    chat_format: ChatFormat
    sessions: int | None = None
    closing: Sequence[Callable[[], Awaitable[None]]] = ()

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise `ConfigError` if the loop cannot parse turns with this tokenizer."""
        self.chat_format.check(tokenizer)

    @property
    def resumable(self) -> bool:
        """See `AgentLoop.resumable`."""
        return self.environments.resumable

    async def run(self, rollout: Rollout) -> Sample:
        """See `AgentLoop.run`. Raises `SampleFailed` if the environment fails."""
        check_length(rollout)
        previous = rollout.previous
        async with self.environments.open() as environment:
            opening = await self._opening(environment, rollout)
            messages = (*prompt_messages(rollout.prompt), *opening.messages)
            conversation = Conversation.begin(rollout.tokenizer, messages, opening.tools)
            if len(conversation.prompt_ids) > rollout.max_prompt_tokens:
                return failed(
                    f"the prompt has {len(conversation.prompt_ids)} tokens with its tools and the environment's "
                    f"messages; max_prompt_tokens is {rollout.max_prompt_tokens}",
                    FailureKind.PROMPT,
                )
            dialogue = _Dialogue(rollout, self.environments, environment, self.chat_format, opening, conversation)
            if previous.segments:
                dialogue.resume(previous)
            return dialogue.sample(await dialogue.run())

    async def close(self) -> None:
        """Release the resources that the samples share."""
        for close in self.closing:
            await close()

    async def _opening(self, environment: AnyEnvironment, rollout: Rollout) -> Opening:
        prompt, session = rollout.prompt, rollout.session
        if not rollout.previous.segments:
            return await self.environments.setup(environment, prompt, session)
        messages: Sequence[Message] = rollout.previous.extra["messages"]
        return await self.environments.resume(environment, prompt, session, messages)


EMPTY_TURN: Final = Turn("", "")
INVALID_ACTIONS: Final = "invalid_actions"
"""The key in `Sample.extra` for the number of the model's actions that an environment refused."""


@dataclass(slots=True)
class _Dialogue:
    """One conversation with an environment. `conversation` ends with the model's last turn; `messages` follow the
    opening; `turn` is the model's last turn, and `text` is the part of that turn that the judge sees. `rewards` has one
    entry for each of the model's turns so far, None for a turn without a reward. `invalid` counts the actions that the
    environment refused."""

    rollout: Rollout
    environments: Environments
    environment: AnyEnvironment
    chat_format: ChatFormat
    opening: Opening
    conversation: Conversation
    messages: list[Message] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    invalid: int = 0
    turn: Turn = EMPTY_TURN
    text: str = ""
    has_turns: bool = True

    def resume(self, previous: Sample) -> None:
        """Continue an interrupted conversation that was kept before a model's turn."""
        self.messages = list(previous.extra["messages"])
        self.conversation = self.conversation.resumed(self.messages, previous.segments)
        self.text = previous.text
        self.invalid = previous.extra.get(INVALID_ACTIONS, 0)
        self.rewards = [None] * sum(message["role"] == "assistant" for message in self.messages)
        if TURN_REWARDS in previous.extra:
            self.rewards = list(previous.extra[TURN_REWARDS])
        elif "environment_reward" in previous.extra:  # kept by a worker of an earlier release
            self.rewards[-1] = previous.extra["environment_reward"]

    async def run(self) -> FinishReason:
        """Take turns until the conversation ends, and return the reason."""
        upcoming = self.conversation
        taken = sum(message["role"] == "assistant" for message in self.messages)
        for turn in range(taken + 1, self.environments.limits.max_turns + 1):
            if turn > taken + 1:
                self._keep(upcoming)
            try:
                reason = await self._model_turn(upcoming, turn)
            except ContextFull:
                if turn == 1:
                    raise
                return FinishReason.LENGTH
            if reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS):
                return reason
            step = await self._environment_turn()
            if step.done or step.truncated:
                return FinishReason.LENGTH if step.truncated else reason
            upcoming = self.conversation.after_environment(step.messages)
            self.messages = list(upcoming.messages[-len(self.messages) :])  # the model's turn in its rendered form
            if tokens_left(self.rollout, upcoming) <= 0:
                return FinishReason.LENGTH
        self.has_turns = False
        return FinishReason.LENGTH  # the model had not finished

    def _keep(self, upcoming: Conversation) -> None:
        """Keep the conversation before a model's turn, in case this worker is killed."""
        if self.rollout.keep is not None:
            self.rollout.keep(replace(self, conversation=upcoming).sample(FinishReason.ABORT))

    async def _model_turn(self, upcoming: Conversation, turn: int) -> FinishReason:
        completion = await self.rollout.generate(next_request(self.rollout, upcoming, turn))
        if parse_reason(completion.finish_reason) is FinishReason.ABORT:
            self.conversation = upcoming  # the next attempt takes this turn again
            return FinishReason.ABORT
        await self._read(upcoming, completion)
        self.messages.append(self.conversation.messages[-1])
        self.rewards.append(None)
        return parse_reason(completion.finish_reason)

    async def _read(self, upcoming: Conversation, completion: Completion) -> None:
        """Parse the model's turn and add it to the conversation."""
        tokenizer, ids = self.rollout.tokenizer, completion.ids.tolist()
        end_ids = self.rollout.sampling.end_ids(tokenizer.eos_ids)
        self.conversation = upcoming.after_model(completion, end_ids)
        text = self.conversation.messages[-1]["content"]
        without_end = ids[:-1] if ids and ids[-1] in end_ids else ids
        tools = self.opening.tools or None  # an environment may describe tools in words
        self.turn = await self.chat_format.parse(tokenizer, text, without_end, tools, upcoming.rendered)
        if self.chat_format.verbatim:
            self.text = tokenizer.decode(ids)
        else:
            self.text = self.turn.content.strip()
            self.conversation = self.conversation.with_forms(forms(self.turn, tokenizer))

    async def _environment_turn(self) -> Step:
        text = self.turn.text if self.chat_format.verbatim else self.text
        step = await self.environments.step(self.environment, self.turn, text)
        self.messages.extend(step.messages)
        self.invalid += step.invalid
        if step.reward is not None:
            try:
                self.rewards[-1] = finite(step.reward, "a number")
            except ValueError as error:
                raise SampleFailed(FailureKind.ENVIRONMENT, f"a step of the environment {error}") from error
        return step

    def sample(self, reason: FinishReason) -> Sample:
        """The sample of a conversation that ended with `reason`. Raises `SampleFailed` if the sample ran out of turns
        or tokens without a reward, and the settings make such samples fail."""
        sample = finish(self.rollout, self.conversation.segments, reason, self.text)
        turns, given = self._turn_rewards(reason)
        earned = present(turns)
        rewards = {"environment_reward": sum(earned), TURN_REWARDS: [reward or 0.0 for reward in turns]}
        return replace(
            sample,
            reward=given if sample.status is SampleStatus.COMPLETED else None,
            session_id=self.rollout.session,
            tools=self.opening.tools,
            tool_choice="auto" if self.opening.tools else None,
            extra={"messages": [*self.messages]}
            | filled({INVALID_ACTIONS: self.invalid})
            | (rewards if earned else {}),
        )

    def _turn_rewards(self, reason: FinishReason) -> tuple[Sequence[float | None], float | None]:
        """The turns' rewards, and the reward that the settings give to an unfinished sample as a whole."""
        if reason is not FinishReason.LENGTH or present(self.rewards):
            return self.rewards, None
        given = self._given_unfinished()
        return ([*self.rewards[:-1], given], None) if self.environments.give_rewards else (self.rewards, given)

    def _given_unfinished(self) -> float | None:
        unfinished = self.environments.unfinished
        if unfinished != "fail":
            return None if unfinished == "judge" else unfinished
        if self.has_turns:
            raise SampleFailed(FailureKind.CONTEXT, "unfinished: it ran out of tokens before it had a reward")
        turns = self.environments.limits.max_turns
        raise SampleFailed(FailureKind.ENVIRONMENT, f"unfinished: it took max_turns = {turns} without a reward")


def next_request(rollout: Rollout, conversation: Conversation, turn: int) -> Request:
    """The request for the model's turn number `turn`, with a seed for this turn.

    The prompt holds all earlier turns, so their stop strings do not end the response.
    """
    sampling = replace(
        rollout.sampling,
        max_tokens=tokens_left(rollout, conversation),
        seed=None if rollout.sampling.seed is None else turn_seed(rollout.sampling.seed, turn),
    )
    return Request(conversation.context, sampling, priority=rollout.priority, session=rollout.session)


def tokens_left(rollout: Rollout, conversation: Conversation) -> int:
    """The number of tokens left for the rest of the conversation; 0 or less if another turn does not fit."""
    max_tokens = rollout.sampling.max_tokens
    return min(
        max_tokens - conversation.response_tokens, rollout.max_prompt_tokens + max_tokens - len(conversation.context)
    )


def prompt_messages(prompt: Prompt) -> tuple[Message, ...]:
    """A prompt's messages; a string becomes a user message. Raises `SampleFailed` for token ids."""
    if prompt.ids is not None:
        problem = (
            "prompt: it has token ids, and a conversation of several turns needs messages or a string: give the row "
            'one of these, and set rows.ids_field = ""'
        )
        raise SampleFailed(FailureKind.PROMPT, problem)
    return ({"role": "user", "content": prompt.content},) if isinstance(prompt.content, str) else prompt.content


def environment_loop(**options: Any) -> MultiTurn:
    """The loop `environment` from its `agent_options`. Raises `ConfigError` when the options name no environment."""
    settings = EnvironmentSettings(**options)
    make_environment = load_plugin("environment", settings.environment, {})

    def make() -> AnyEnvironment:
        environment: AnyEnvironment = make_environment(**settings.options)
        return environment

    try:
        made = make()
    except (TypeError, ValueError, ValidationError) as error:
        raise ConfigError(
            f"environment {settings.environment!r} cannot be made with options {settings.options!r}: {error}"
        ) from error
    check_object(made, TURN_ENVIRONMENT if hasattr(made, "respond") else ENVIRONMENT, settings.environment)
    resumable = isinstance(made, ResumableEnvironment)
    limits = Limits(settings.max_turns, settings.setup_timeout_s, settings.step_timeout_s)
    chat_format = make_format(settings.tool_parser, settings.reasoning_parser)
    environments = Environments(make, limits, resumable=resumable, unfinished=settings.unfinished)
    return MultiTurn(environments, chat_format, settings.concurrent)
