"""What a judge may return, and what becomes of it."""

import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from rollq.workers.judging.rewards import Credit, check_reward, plain_credit, plain_verdict

NOT_NUMBERS = ["1", "34", b"1", True, False, np.True_, None, [1.0], 1j, np.array([1.0, 2.0]), object(), {}, (1.0,)]


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.int64(1), Decimal(1), np.array(1.0), torch.tensor(1.0)])
def test_a_real_number_is_a_reward(number: Any) -> None:
    assert check_reward(number).reward == 1.0


@pytest.mark.parametrize("answer", [*NOT_NUMBERS, math.nan, math.inf, "nan", 10**400])
def test_nothing_else_is_a_reward_nor_part_of_one(answer: Any) -> None:
    with pytest.raises(ValueError, match="returned"):
        check_reward(answer)
    with pytest.raises(ValueError, match="whose entry 'right' is not a finite number"):
        check_reward({"style": 1.0, "right": answer})
    with pytest.raises(ValueError, match="returned"):
        plain_credit(Credit(turns=[1.0, answer]))


def test_numbers_by_name_add_up() -> None:
    verdict = check_reward({"right": 1, "short": np.float32(0.5)})
    assert verdict.reward == 1.5
    assert (verdict.parts, verdict.facts, verdict.notes) == ({"right": 1.0, "short": 0.5}, {}, {})


def test_facts_beside_a_score_do_not_count() -> None:
    verdict = check_reward({"score": -1.0, "acc": True, "pred": "999", "tokens": 12, "steps": [1, 2], "why": None})
    assert verdict.reward == -1.0
    assert verdict.parts == {"score": -1.0}
    assert verdict.facts == {"acc": 1.0, "tokens": 12.0}
    assert verdict.notes == {"pred": "999", "steps": [1, 2], "why": None}
    assert check_reward(plain_verdict(verdict)).reward == -1.0


@pytest.mark.parametrize("score", NOT_NUMBERS)
def test_a_score_is_a_number(score: Any) -> None:
    with pytest.raises(ValueError, match="whose entry 'score' is not a finite number"):
        check_reward({"score": score, "acc": 1.0})


def test_a_fact_that_is_not_json_is_refused() -> None:
    with pytest.raises(ValueError, match="returned 'pred': <object"):
        check_reward({"score": 1.0, "pred": object()})
    with pytest.raises(ValueError, match="not JSON"):
        check_reward({"score": 1.0, "pred": "\ud800"})
