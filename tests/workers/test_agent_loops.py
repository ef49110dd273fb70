"""Agent loops by name."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.values.rollouts import Lease, Prompt, Sample
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.groups.agent_loops import gives_rewards, make_loop
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.groups.task_settings import WorkerTask
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.settings import WorkerSettings


class Own:
    """A custom loop."""

    resumable: ClassVar[bool] = True

    def __init__(self, drafts: int = 1) -> None:
        self.drafts = drafts

    async def run(self, rollout: Rollout) -> Sample:
        raise NotImplementedError


def test_xp16_loops_of_ones_own_come_from_a_dotted_path() -> None:
    assert isinstance(make_loop("single_turn", {}), SingleTurn)
    assert isinstance(make_loop("rollq.workers.agents.loops.SingleTurn", {}), SingleTurn)
    known = "environment, harness, outside, single_turn, tools, or a dotted path"
    with pytest.raises(ConfigError, match=f"agent loop .two_turns.: use {known}"):
        make_loop("two_turns", {})


def test_a_class_that_is_no_loop_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        make_loop("pathlib.PurePosixPath", {})
    assert str(refused.value) == (
        'agent_loop = "pathlib.PurePosixPath": PurePosixPath has no run; '
        "expected async def run(self, rollout) -> Sample"
    )


class Plain(Own):
    def run(self, rollout: Rollout) -> Sample:  # type: ignore[override]
        raise NotImplementedError


class Narrow(Own):
    async def run(self) -> Sample:  # type: ignore[override]
        raise NotImplementedError


class Unsure(Own):
    resumable: ClassVar[Any] = "yes"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Plain", "def Plain.run(rollout) is not async; expected async def run(self, rollout) -> Sample"),
        (
            "Narrow",
            "async def Narrow.run() has the wrong parameters (too many positional arguments); expected async def run",
        ),
        ("Unsure", "Unsure.resumable is 'yes'; expected resumable: bool = False"),
    ],
)
def test_a_loop_that_would_fail_every_sample_is_refused_at_the_start(name: str, problem: str) -> None:
    task = WorkerTask(batch_groups=1, agent_loop=f"{__name__}.{name}")
    with pytest.raises(ConfigError) as refused:
        make_recipes({"math": task}, WorkerSettings(engine="simulated"), 0, JudgePool(1))
    assert str(refused.value).startswith(f'tasks.math: agent_loop = "{__name__}.{name}": {problem}')


class Short:
    async def run(self, rollout: Rollout) -> Sample:
        raise NotImplementedError


@pytest.mark.parametrize(("name", "resumes"), [("Short", False), ("Own", True)])
def test_a_loop_that_does_not_say_so_is_not_resumable(name: str, resumes: bool) -> None:
    task = WorkerTask(batch_groups=1, agent_loop=f"{__name__}.{name}", partial_rollout=True)
    recipe = make_recipes({"math": task}, WorkerSettings(engine="simulated"), 0, JudgePool(1))["math"]
    lease = Lease("math", 1, 1, "nonce", 1, Prompt("p"), samples=(), step=1)
    assert recipe.resumes(lease) is resumes


def test_a_task_gives_its_loop_its_options() -> None:
    task = WorkerTask(batch_groups=1, agent_loop=f"{__name__}.Own", agent_options={"drafts": 3})
    loop = make_recipes({"math": task}, WorkerSettings(engine="simulated"), 0, JudgePool(1))["math"].loop
    assert isinstance(loop, Own)
    assert loop.drafts == 3


@pytest.mark.parametrize(
    ("name", "options"), [("single_turn", {"turns": 3}), (f"{__name__}.Own", {"turns": 3}), ("tools", {"turns": 3})]
)
def test_options_that_a_loop_does_not_take_are_refused_with_its_name(name: str, options: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"agent_options of agent loop '{name}': .*turns"):
        make_loop(name, options)


def test_only_environments_and_custom_loops_give_rewards() -> None:
    names = ("single_turn", "tools", "environment", "my_package.loops.Debate")
    assert [gives_rewards(name) for name in names] == [False, False, True, True]
