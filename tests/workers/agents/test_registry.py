"""Agent loops by name."""

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from rollq.buffer.errors import ConfigError
from rollq.buffer.rollouts import Sample
from rollq.workers.agents.loops import Rollout, SingleTurn
from rollq.workers.agents.registry import gives_rewards, make_loop
from rollq.workers.groups.recipes import make_recipes
from rollq.workers.judging.process_pool import JudgePool
from rollq.workers.settings import WorkerSettings
from rollq.workers.task_settings import WorkerTask


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
    with pytest.raises(ConfigError, match="agent loop 'two_turns': use environment, single_turn, tools, or a dotted"):
        make_loop("two_turns", {})


def test_a_class_that_is_no_loop_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"agent loop 'pathlib.Path' lacks the method run"):
        make_loop("pathlib.Path", {})


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
