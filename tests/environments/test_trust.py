"""Graders that need trust: wrong ones, and those that run texts as code where processes cannot be sealed."""

import asyncio
from typing import Any

import pytest

from rollq.buffer.common.sealing import probe
from rollq.buffer.common.sealing.process import Means
from rollq.buffer.errors import ConfigError
from rollq.environments.reasoning_gym import judge
from rollq.environments.reasoning_gym.package import WRONG
from rollq.workers.judging.judge import JudgeContext
from rollq.workers.judging.judges import make_judge
from rollq.workers.judging.process_pool import JudgePool


def make(generator: str, **options: Any) -> None:
    async def made() -> None:
        settings = {"generator": generator, **options}
        make_judge("rollq.environments.reasoning_gym.judge.JUDGE", settings, JudgeContext(1.0, JudgePool(1)))

    asyncio.run(made())


def cannot_seal() -> dict[Means, str]:
    return dict.fromkeys(Means, "not here")


@pytest.mark.parametrize("generator", WRONG)
def test_a_wrong_grader_is_refused_unless_it_is_trusted(generator: str) -> None:
    with pytest.raises(ConfigError, match=f"{generator}.*: its grader gives .* set env_options.trust_graders = true"):
        make(generator)
    make(generator, trust_graders=True)


def test_a_grader_that_runs_texts_is_refused_where_nothing_seals_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (probe, judge):
        monkeypatch.setattr(module, "sealing_available", cannot_seal)
    with pytest.raises(ConfigError, match=r"countdown.*cannot seal processes .*: set env_options.trust_graders = true"):
        make("countdown")
    make("countdown", trust_graders=True)
    make("chain_sum")
