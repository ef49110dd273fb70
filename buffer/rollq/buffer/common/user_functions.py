"""The contracts for user code: which functions rollq calls, and with which arguments. Checked at start.

`CONTRACTS` lists them all; docs/guide/user-code.md shows the list, and a test compares the two.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rollq.buffer.errors import ConfigError


class How(StrEnum):
    """How a function must be defined."""

    PLAIN = "def"
    ASYNC = "async def"
    EITHER = "def or async def"


@dataclass(frozen=True, slots=True)
class Function:
    """A function that rollq calls with `parameters` by position and `keywords` by name. An `optional` function may be
    absent."""

    name: str
    parameters: tuple[str, ...]
    returns: str
    how: How
    keywords: tuple[str, ...] = ()
    is_method: bool = False
    optional: bool = False

    def __str__(self) -> str:
        given = ("self",) * self.is_method + self.parameters + self.keywords
        return f"{self.how} {self.name}({', '.join(given)}) -> {self.returns}"


@dataclass(frozen=True, slots=True)
class Flag:
    """A bool attribute of an object; required unless it has a `default`."""

    name: str
    default: bool | None = None

    def __str__(self) -> str:
        return f"{self.name}: bool" + ("" if self.default is None else f" = {self.default}")


@dataclass(frozen=True, slots=True)
class Contract:
    """The functions and flags that the object named by `setting` must have: a function, or an object with methods."""

    setting: str
    functions: tuple[Function, ...]
    flags: tuple[Flag, ...] = ()


def _method(
    name: str, *parameters: str, returns: str = "None", how: How = How.ASYNC, optional: bool = False
) -> Function:
    return Function(name, parameters, returns, how, is_method=True, optional=optional)


_REWARD: Final = "float, dict[str, float] or Credit"
_REWARDS: Final = "list of float, dict[str, float], Credit or None"
_SETUP: Final = _method("setup", "prompt", "session", returns="Opening")
_REST: Final = (
    _method("teardown"),
    _method("resume", "prompt", "session", "messages", returns="Opening", optional=True),
)

JUDGE: Final = Contract("judge", (Function("reward", ("prompt", "sample"), _REWARD, How.EITHER),))
POOLS_JUDGE: Final = Contract("judge", (Function("reward", ("prompt", "sample"), _REWARD, How.ASYNC, ("pools",)),))
ISOLATED_JUDGE: Final = Contract("judge", (Function("reward", ("prompt", "sample"), _REWARD, How.PLAIN),))
GROUP_JUDGE: Final = Contract("group_judge", (Function("rank", ("prompt", "samples"), _REWARDS, How.EITHER),))
POOLS_GROUP_JUDGE: Final = Contract(
    "group_judge", (Function("rank", ("prompt", "samples"), _REWARDS, How.ASYNC, ("pools",)),)
)
ISOLATED_GROUP_JUDGE: Final = Contract("group_judge", (Function("rank", ("prompt", "samples"), _REWARDS, How.PLAIN),))
FILTER: Final = Contract("filters", (Function("keeps", ("prompt", "samples"), "bool", How.EITHER),))
AGENT_LOOP: Final = Contract(
    "agent_loop", (_method("run", "rollout", returns="Sample"),), (Flag("resumable", default=False),)
)
ENVIRONMENT: Final = Contract("environment", (_SETUP, _method("step", "text", returns="Step"), *_REST))
TURN_ENVIRONMENT: Final = Contract("environment", (_SETUP, _method("respond", "turn", returns="Step"), *_REST))
ENGINE: Final = Contract(
    "engine",
    (
        _method("start"),
        _method("generate", "request", returns="Completion"),
        _method("swap", "weights", "version", "mode", returns="float"),
        _method("abort", "requests"),
        _method("sleep"),
        _method("wake"),
        _method("close"),
    ),
)
PROMPT_ORDER: Final = Contract(
    "prompt_order",
    (
        _method("pass_order", "rows", "seeds", "number", returns="int64 array", how=How.PLAIN),
        _method("takes", "row", "number", "stats", returns="bool", how=How.PLAIN),
    ),
    (Flag("uses_stats"),),
)
SHOULD_CONTINUE: Final = Contract("should_continue", (Function("should_continue", ("state",), "bool", How.PLAIN),))
OPERATOR: Final = Contract(
    "pipeline", (Function("operator", ("groups",), "list[ScoredGroup], alone or with dict[str, float]", How.PLAIN),)
)
EVALUATION_METRICS: Final = Contract(
    "evaluation_metrics", (Function("evaluation_metrics", ("name", "groups"), "dict[str, float]", How.PLAIN),)
)
PRIORITIES: Final = Contract("priorities", (Function("priorities", ("batch",), "list of float", How.PLAIN),))
LOSS: Final = Contract(
    "loss", (Function("loss", (), "tensor", How.PLAIN, ("new", "old", "behaviour", "advantages", "samples")),)
)

CONTRACTS: Final[Mapping[str, Contract]] = {
    "judge": JUDGE,
    "judge that asks pools": POOLS_JUDGE,
    "judge with `isolate_judge`": ISOLATED_JUDGE,
    "group judge": GROUP_JUDGE,
    "group judge that asks pools": POOLS_GROUP_JUDGE,
    "group judge with `isolate_judge`": ISOLATED_GROUP_JUDGE,
    "filter": FILTER,
    "agent loop": AGENT_LOOP,
    "environment": ENVIRONMENT,
    "environment that reads turns": TURN_ENVIRONMENT,
    "engine": ENGINE,
    "prompt order": PROMPT_ORDER,
    "hook": SHOULD_CONTINUE,
    "pipeline operator": OPERATOR,
    "priorities": PRIORITIES,
    "loss": LOSS,
    "metrics of evaluations": EVALUATION_METRICS,
}
"""Description of user code -> its contract. Tools have none: a model calls them, with any arguments."""


def check_function(function: Any, contract: Contract, path: str = "") -> None:
    """Raise `ConfigError` unless `function` can be called according to the contract.

    `path` is the function's dotted path in the setting, '' if the function was passed as an argument.
    """
    (needed,) = contract.functions
    if inspect.isclass(function):
        raise ConfigError(f"{_written(contract, path)}: {function.__qualname__} is a class; expected {needed}")
    name = getattr(function, "__qualname__", path or type(function).__name__)
    _check(function, needed, _written(contract, path), name)


def check_object(made: Any, contract: Contract, path: str) -> None:
    """Raise `ConfigError` unless `made`, created from the object at `path`, has the contract's functions and flags."""
    where, name = _written(contract, path), type(made).__name__
    asked: tuple[Flag | Function, ...] = (*contract.flags, *contract.functions)
    if missing := [needed for needed in asked if not _has(made, needed)]:
        names, signatures = ", ".join(one.name for one in missing), ", ".join(map(str, missing))
        raise ConfigError(f"{where}: {name} has no {names}; expected {signatures}")
    _check_flags(made, contract.flags, f"{where}: {name}")
    for needed in contract.functions:
        if hasattr(made, needed.name):
            _check(getattr(made, needed.name), needed, where, f"{name}.{needed.name}")


def _check_flags(made: Any, flags: Iterable[Flag], name: str) -> None:
    for flag in flags:
        if not isinstance(found := getattr(made, flag.name, flag.default), bool):
            raise ConfigError(f"{name}.{flag.name} is {found!r:.80}; expected {flag}")


def _has(made: Any, needed: Flag | Function) -> bool:
    """Whether an object has the flag or function that a contract needs, or may lack it."""
    if isinstance(needed, Flag):
        return needed.default is not None or hasattr(made, needed.name)
    return needed.optional or callable(getattr(made, needed.name, None))


@contextmanager
def inside(table: str) -> Iterator[None]:
    """Prefix `ConfigError`s raised in the block with the `rollq.toml` table that has the settings."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{table}: {error}") from error


def _written(contract: Contract, path: str) -> str:
    """The setting as it is written in `rollq.toml`."""
    return f'{contract.setting} = "{path}"' if path else contract.setting


def _check(function: Callable[..., Any], needed: Function, where: str, name: str) -> None:
    if not callable(function):
        raise ConfigError(f"{where}: {name} is {function!r:.80}; expected {needed}")
    is_async = _is_async(function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C: only a call shows whether it fits
        return
    how = How.ASYNC if is_async else How.PLAIN
    shown = f"{how} {name}{_plain(signature)}"
    if needed.how not in (How.EITHER, how):
        raise ConfigError(f"{where}: {shown} is {'async' if is_async else 'not async'}; expected {needed}")
    try:
        signature.bind(*needed.parameters, **dict.fromkeys(needed.keywords))
    except TypeError as error:
        raise ConfigError(f"{where}: {shown} has the wrong parameters ({error}); expected {needed}") from error


def _is_async(function: Callable[..., Any]) -> bool:
    """Whether calling a function, a decorated function, or an object with `__call__` returns a coroutine."""
    candidates = (function, inspect.unwrap(function), getattr(function, "__call__", None))  # noqa: B004
    return any(map(inspect.iscoroutinefunction, candidates))


def _plain(signature: inspect.Signature) -> str:
    """The signature without types."""
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))
