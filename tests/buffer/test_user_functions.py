"""What rollq asks of code that users write, and how it refuses what it could not call."""

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollq.buffer.common.user_functions import (
    AGENT_LOOP,
    CONTRACTS,
    ENGINE,
    ENVIRONMENT,
    FILTER,
    JUDGE,
    OPERATOR,
    POOLS_JUDGE,
    PROMPT_ORDER,
    SHOULD_CONTINUE,
    TURN_ENVIRONMENT,
    Contract,
    How,
    check_function,
    check_object,
)
from rollq.buffer.errors import ConfigError
from rollq.producer.coordinator import BatchCoordinator
from rollq.producer.prompt_order import PromptOrder
from rollq.producer.run import open_prompts
from rollq.workers.agents.environments import Environment, ResumableEnvironment, TurnEnvironment
from rollq.workers.agents.loops import AgentLoop
from rollq.workers.engines.protocol import Engine
from support.producer_run import prompt_file, task_settings


def two(prompt: Any, sample: Any) -> None: ...
async def two_async(prompt: Any, sample: Any) -> None: ...
async def three_async(prompt: Any, sample: Any, pools: Any) -> None: ...
def one(state: Any) -> None: ...
async def one_async(state: Any) -> None: ...


@functools.wraps(one_async)
def wrapped(*args: Any) -> Any:
    return one_async(*args)


class Called:
    async def __call__(self, prompt: Any, sample: Any) -> None: ...


FITTING: list[tuple[Any, Contract]] = [
    (two, JUDGE),
    (two_async, JUDGE),
    (Called(), JUDGE),
    (lambda *args: None, FILTER),
    (max, FILTER),
    (functools.partial(two, sample=1), SHOULD_CONTINUE),
    (three_async, POOLS_JUDGE),
    (one, SHOULD_CONTINUE),
    (one, OPERATOR),
]


@pytest.mark.parametrize(("function", "contract"), FITTING)
def test_a_function_that_can_be_called_is_accepted(function: Any, contract: Contract) -> None:
    check_function(function, contract, "mine.function")


@pytest.mark.parametrize(
    ("function", "contract", "message"),
    [
        (
            one,
            JUDGE,
            'judge = "mine.function": def one(state) has the wrong parameters (too many positional arguments); '
            "expected def or async def reward(prompt, sample) -> float, dict[str, float] or Credit",
        ),
        (
            two,
            SHOULD_CONTINUE,
            'should_continue = "mine.function": def two(prompt, sample) has the wrong parameters (missing a required '
            "argument: 'sample'); expected def should_continue(state) -> bool",
        ),
        (
            one_async,
            SHOULD_CONTINUE,
            'should_continue = "mine.function": async def one_async(state) is async; expected '
            "def should_continue(state) -> bool",
        ),
        (
            wrapped,
            SHOULD_CONTINUE,
            'should_continue = "mine.function": async def one_async(state) is async; expected '
            "def should_continue(state) -> bool",
        ),
        (
            two_async,
            POOLS_JUDGE,
            'judge = "mine.function": async def two_async(prompt, sample) has the wrong parameters (got an unexpected '
            "keyword argument 'pools'); expected "
            "async def reward(prompt, sample, pools) -> float, dict[str, float] or Credit",
        ),
        (
            Called,
            JUDGE,
            'judge = "mine.function": Called is a class; expected '
            "def or async def reward(prompt, sample) -> float, dict[str, float] or Credit",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_in_one_sentence(
    function: Any, contract: Contract, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_function(function, contract, "mine.function")
    assert str(refused.value) == message


class Half:
    async def setup(self, prompt: Any, session: str) -> None: ...
    async def step(self, text: str) -> None: ...
    async def teardown(self) -> None: ...
    def resume(self, prompt: Any, session: str, messages: Any) -> None: ...


def test_a_method_that_may_be_absent_is_checked_where_it_exists() -> None:
    with pytest.raises(ConfigError, match=r"Half.resume\(prompt, session, messages\) is not async; expected async def"):
        check_object(Half(), ENVIRONMENT, "mine.Half")
    with pytest.raises(ConfigError, match=r"Half has no respond; expected async def respond\(self, turn\) -> Step$"):
        check_object(Half(), TURN_ENVIRONMENT, "mine.Half")


def test_a_hook_is_checked_before_anything_is_produced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hooks", sys.modules[__name__])
    task = task_settings(prompt_file(tmp_path / "p.jsonl", 3), should_continue="hooks.one_async")
    with (
        pytest.raises(ConfigError, match=r'^tasks.math: should_continue = "hooks.one_async": async def one_async'),
        open_prompts({"math.1of2": task}, {}),
    ):
        pass


def test_an_operator_is_checked_when_it_is_given() -> None:
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"^pipeline: async def one_async\(state\) is async; expected def operator"):
        BatchCoordinator(nothing, nothing, pipeline=[one, one_async])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("contract", "protocols"),
    [
        (AGENT_LOOP, [AgentLoop]),
        (ENVIRONMENT, [Environment, ResumableEnvironment]),
        (TURN_ENVIRONMENT, [TurnEnvironment, ResumableEnvironment]),
        (ENGINE, [Engine]),
        (PROMPT_ORDER, [PromptOrder]),
    ],
)
def test_the_contracts_of_classes_are_those_of_their_protocols(contract: Contract, protocols: list[type]) -> None:
    methods: dict[str, Callable[..., Any]] = {
        name: method
        for protocol in protocols
        for name, method in vars(protocol).items()
        if inspect.isfunction(method) and not name.startswith("_")
    }
    assert {
        name: (tuple(inspect.signature(method).parameters)[1:], inspect.iscoroutinefunction(method))
        for name, method in methods.items()
    } == {needed.name: (needed.parameters, needed.how is How.ASYNC) for needed in contract.functions}


def test_the_page_of_user_code_has_every_contract_and_no_other() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in Path("docs/guide/user-code.md").read_text("utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert [(setting.strip("`"), what, signatures) for setting, what, signatures in rows] == [
        (contract.setting, what, "; ".join(_described(contract))) for what, contract in CONTRACTS.items()
    ]


def _described(contract: Contract) -> list[str]:
    functions = [f"`{needed}`" + (" (optional)" if needed.optional else "") for needed in contract.functions]
    return functions + [f"`{flag}`" for flag in contract.flags]
