"""Agent loops by their names in the settings."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.plugins import check_methods, load_plugin
from rollq.buffer.settings import problems
from rollq.workers.agents.loops import AgentLoop, SingleTurn
from rollq.workers.agents.multi_turn import environment_loop
from rollq.workers.agents.tools import tools_loop

BUILT_IN: Final[Mapping[str, Callable[..., AgentLoop]]] = {
    "single_turn": SingleTurn,
    "tools": tools_loop,
    "environment": environment_loop,
}


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
        wrong = problems(error)
    except TypeError as error:
        wrong = f"{error}; given: {', '.join(options)}"
    raise ConfigError(f"agent_options of agent loop {name!r}: {wrong}")
