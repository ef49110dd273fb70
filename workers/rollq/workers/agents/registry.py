"""Agent loops by their names in the settings."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.plugins import check_methods, load_plugin
from rollq.buffer.settings_errors import explanation
from rollq.workers.agents.loops import AgentLoop, SingleTurn
from rollq.workers.agents.multi_turn import environment_loop
from rollq.workers.agents.tools import tools_loop

BUILT_IN: Final[Mapping[str, Callable[..., AgentLoop]]] = {
    "single_turn": SingleTurn,
    "tools": tools_loop,
    "environment": environment_loop,
}

_WITHOUT_REWARDS = frozenset({"single_turn", "tools"})
"""Built-in loops whose samples have no environment that could reward them."""


def gives_rewards(name: str) -> bool:
    """Whether the samples of the agent loop called `name` may carry rewards of an environment."""
    return name not in _WITHOUT_REWARDS


def make_loop(name: str, options: Mapping[str, Any]) -> AgentLoop:
    """A built-in agent loop, or one's own class by dotted path, made with `options`.

    Raises `ConfigError` when there is none such, or it does not take the options.
    """
    make: Callable[..., AgentLoop] = load_plugin("agent loop", name, BUILT_IN)
    try:
        loop = make(**options)
        check_methods("agent loop", name, loop, "run")
        return loop
    except ValidationError as error:
        wrong = explanation(error)
    except TypeError as error:
        wrong = f"{error}; given: {', '.join(options)}"
    raise ConfigError(f"agent_options of agent loop {name!r}: {wrong}")
