"""Agent loops, by the names that the settings use."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Final

from pydantic import ValidationError

from rollq.buffer.common.plugins import load_plugin
from rollq.buffer.common.user_functions import AGENT_LOOP, check_object
from rollq.buffer.errors import ConfigError
from rollq.buffer.rules.settings import Settings
from rollq.buffer.settings_errors import explanation
from rollq.workers.agents.loops import AgentLoop, SingleTurn
from rollq.workers.agents.multi_turn import EnvironmentSettings, MultiTurn, environment_loop
from rollq.workers.agents.tool_environment import ToolsSettings, tools_loop
from rollq.workers.engines.protocol import Tokenizer
from rollq.workers.gateway.harnesses.local import Harness, HarnessSettings, harness_loop
from rollq.workers.gateway.harnesses.remote import Outside, OutsideSettings, outside_loop
from rollq.workers.gateway.open_sessions import Gateway
from rollq.workers.settings import GatewaySettings


@dataclass(frozen=True, slots=True)
class BuiltInLoop:
    """A built-in agent loop, made with its options. If the loop `gives_rewards`, its samples earn rewards along the
    way, and the judge `environment` can read the rewards.
    """

    make: Callable[..., AgentLoop]
    options: type[Settings] | None = None
    gives_rewards: bool = False


BUILT_IN: Final[Mapping[str, BuiltInLoop]] = {
    "single_turn": BuiltInLoop(SingleTurn),
    "tools": BuiltInLoop(tools_loop, ToolsSettings),
    "environment": BuiltInLoop(environment_loop, EnvironmentSettings, gives_rewards=True),
    "harness": BuiltInLoop(harness_loop, HarnessSettings),
    "outside": BuiltInLoop(outside_loop, OutsideSettings),
}


_MAKERS: Final = {name: loop.make for name, loop in BUILT_IN.items()}


def gives_rewards(name: str) -> bool:
    """Whether samples of the agent loop called `name` may earn rewards along the way. True for custom loops."""
    return name not in BUILT_IN or BUILT_IN[name].gives_rewards


def make_loop(name: str, options: Mapping[str, Any], gateway: Gateway | None = None) -> AgentLoop:
    """A built-in agent loop, or a custom class by dotted path, made with `options`. `gateway` is the worker's, for
    loops whose first parameter has that name.

    Raises `ConfigError` for an unknown loop or unsupported options.
    """
    make: Callable[..., AgentLoop] = load_plugin("agent loop", name, _MAKERS)
    if _takes_gateway(make):
        make = partial(make, gateway or Gateway(GatewaySettings()))
    try:
        loop = make(**options)
    except ValidationError as error:
        problem = explanation(error, BUILT_IN[name].options if name in BUILT_IN else None)
    except TypeError as error:
        problem = f"{error}; given: {', '.join(options)}"
    else:
        check_object(loop, AGENT_LOOP, name)
        return loop
    raise ConfigError(f"agent_options of agent loop {name!r}: {problem}")


def _takes_gateway(make: Callable[..., AgentLoop]) -> bool:
    try:
        return next(iter(signature(make).parameters), "") == "gateway"
    except (TypeError, ValueError):  # some callables have no signature
        return False


def is_offered(loop: AgentLoop) -> bool:
    """Whether sessions of the loop are offered to programs elsewhere."""
    return isinstance(loop, Outside) and loop.is_offered


def check_loop(loop: AgentLoop, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if a built-in loop cannot parse turns with this tokenizer."""
    if isinstance(loop, MultiTurn | Harness | Outside):
        loop.check(tokenizer)


async def close_loop(loop: AgentLoop) -> None:
    """Release what samples of a built-in loop have shared."""
    if isinstance(loop, MultiTurn | Outside):
        await loop.close()
