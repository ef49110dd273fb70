"""The facts about a sample for its agent, in this worker or elsewhere. They never include the answer."""

from collections.abc import Mapping
from typing import Any

from rollq.buffer.common import exact_json
from rollq.buffer.values.rollouts import Prompt
from rollq.workers.agents.loops import Rollout
from rollq.workers.gateway.open_sessions import Gateway


def given_prompt(prompt: Prompt) -> str | list[Mapping[str, Any]]:
    """The prompt for an agent: a string or messages, without the answer. Raises `ValueError` for token ids."""
    if prompt.ids is not None:
        raise ValueError(
            "the prompt has token ids, which agents over the gateway cannot read: give the row text or messages, and "
            'set rows.ids_field = ""'
        )
    return prompt.content if isinstance(prompt.content, str) else list(prompt.content)


def about(rollout: Rollout) -> dict[str, Any]:
    """The facts about a sample for a program. They never include the answer."""
    return {
        "task": rollout.task,
        "row": rollout.prompt.row,
        "sample": rollout.index,
        "metadata": dict(rollout.prompt.metadata),
        "evaluation": rollout.evaluation,
        "max_tokens": rollout.sampling.max_tokens,
    }


def prompt_bytes(prompt: Prompt) -> bytes:
    """The prompt for the command: a string unchanged, or messages as JSON. Raises `ValueError` for token ids."""
    given = given_prompt(prompt)
    return given.encode() if isinstance(given, str) else exact_json.dumps(given)


def session_variables(gateway: Gateway, token: str) -> dict[str, str]:
    """The variables with a session's addresses and token, for clients."""
    base = gateway.base_url(token)
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": token,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_AUTH_TOKEN": token,
        "ROLLQ_SESSION_URL": base,
    }
