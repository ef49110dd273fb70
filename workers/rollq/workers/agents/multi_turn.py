"""The agent loop of several turns: the model and an environment write in turn, until one of them ends it.

Invariant: `Sampling.max_tokens` bounds all that follows the prompt, in tokens, whoever wrote it; and no sequence is
longer than `max_prompt_tokens` and `max_tokens` together, also where a broken prefix began a new segment.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field, ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.plugins import check_methods, load_plugin
from rollq.buffer.rollouts import FinishReason, Prompt, Sample
from rollq.buffer.settings import Settings
from rollq.workers.agents.conversation import Conversation, Message
from rollq.workers.agents.environments import Environment, Environments, Limits, Opening
from rollq.workers.agents.loops import Rollout, failed, finish
from rollq.workers.engines.protocol import ContextFull, Request, parse_reason
from rollq.workers.seeds import turn_seed


class EnvironmentSettings(Settings):
    """`agent_options` of the loop `environment`."""

    environment: str = Field(description="dotted path of your class, see rollq.workers.agents.environments.Environment")
    options: dict[str, Any] = Field(default_factory=dict, description="what the class is made with")
    max_turns: int = Field(default=8, gt=0, description="of the model in one sample")
    concurrent: int = Field(default=256, gt=0, description="environments at the same time, in one worker")
    setup_timeout_s: float = Field(default=60.0, gt=0)
    step_timeout_s: float = Field(default=60.0, gt=0)
    teardown_timeout_s: float = Field(default=10.0, gt=0)


@dataclass(frozen=True, slots=True)
class MultiTurn:
    """Several turns with an environment. What an interrupted sample did there is lost: it starts again."""

    environments: Environments
    resumable: ClassVar[bool] = False

    async def run(self, rollout: Rollout) -> Sample:
        """See `AgentLoop.run`. Raises what the environment raises."""
        async with self.environments.one() as environment:
            opening = await self.environments.setup(environment, rollout.prompt, rollout.session)
            messages = (*prompt_messages(rollout.prompt), *opening.messages)
            talk = Conversation.begin(rollout.tokenizer, messages, opening.tools)
            if len(talk.prompt_ids) > rollout.max_prompt_tokens:
                return failed(
                    f"the prompt has {len(talk.prompt_ids)} tokens with its tools and the environment's messages, "
                    f"max_prompt_tokens is {rollout.max_prompt_tokens}"
                )
            return await self._converse(rollout, environment, opening, talk)

    async def _converse(
        self, rollout: Rollout, environment: Environment, opening: Opening, talk: Conversation
    ) -> Sample:
        limit = self.environments.limits.max_turns
        spoken: list[Message] = []
        rewards: list[float] = []
        heard = talk
        for turn in range(1, limit + 1):
            try:
                completion = await rollout.generate(next_request(rollout, talk, turn))
            except ContextFull:
                if turn == 1:
                    raise
                talk, reason = heard, FinishReason.LENGTH
                break
            reason = parse_reason(completion.finish_reason)
            talk = heard = talk.after_model(completion)
            spoken.append(talk.messages[-1])
            if reason not in (FinishReason.STOP, FinishReason.TOOL_CALLS):
                break
            step = await self.environments.step(environment, spoken[-1]["content"])
            spoken.extend(step.messages)
            if step.reward is not None:
                rewards.append(float(step.reward))
            if step.done:
                break
            answered = talk.after_environment(step.messages)
            if tokens_left(rollout, answered) <= 0:
                reason = FinishReason.LENGTH
                break
            if turn == limit:  # the model wanted to go on
                reason = FinishReason.TOOL_CALLS if opening.tools else FinishReason.LENGTH
                break
            talk = answered
        if reason is FinishReason.LENGTH and not rewards:
            rewards.append(0.0)  # it ended before it earned anything
        sample = finish(rollout, talk.segments, reason, rollout.tokenizer.decode(completion.ids.tolist()))
        return replace(
            sample,
            session_id=rollout.session,
            tools=opening.tools,
            tool_choice="auto" if opening.tools else None,
            extra={"messages": spoken} | ({"environment_reward": sum(rewards)} if rewards else {}),
        )


def next_request(rollout: Rollout, talk: Conversation, turn: int) -> Request:
    """The request for the model's turn number `turn`: all before it is its prompt, so that no stop string in earlier
    turns ends it; its seed is its own."""
    sampling = replace(
        rollout.sampling,
        max_tokens=tokens_left(rollout, talk),
        seed=None if rollout.sampling.seed is None else turn_seed(rollout.sampling.seed, turn),
    )
    return Request(talk.context, sampling, priority=rollout.priority, session=rollout.session)


def tokens_left(rollout: Rollout, talk: Conversation) -> int:
    """How many tokens the rest of the conversation may have; 0 or less when there is no room for another turn."""
    max_tokens = rollout.sampling.max_tokens
    return min(max_tokens - talk.response_tokens, rollout.max_prompt_tokens + max_tokens - len(talk.context))


def prompt_messages(prompt: Prompt) -> tuple[Message, ...]:
    """A prompt's messages; a text is one of the user. Raises `ValueError` for token ids, which no template renders."""
    if prompt.ids is not None:
        raise ValueError("the prompt has token ids, a conversation of several turns needs messages or a text")
    return ({"role": "user", "content": prompt.content},) if isinstance(prompt.content, str) else prompt.content


def environment_loop(**options: Any) -> MultiTurn:
    """The loop `environment` from its `agent_options`. Raises `ConfigError` when they do not give an environment."""
    settings = EnvironmentSettings(**options)
    found = load_plugin("environment", settings.environment, {})

    def make() -> Environment:
        environment: Environment = found(**settings.options)
        return environment

    try:
        check_methods("environment", settings.environment, make(), "setup", "step", "teardown")
    except (TypeError, ValueError, ValidationError) as error:
        raise ConfigError(
            f"environment {settings.environment!r} cannot be made with options {settings.options!r}: {error}"
        ) from error
    limits = Limits(settings.max_turns, settings.setup_timeout_s, settings.step_timeout_s, settings.teardown_timeout_s)
    return MultiTurn(Environments(make, limits, asyncio.Semaphore(settings.concurrent)))
