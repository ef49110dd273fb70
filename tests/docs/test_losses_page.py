"""The page on losses names all of them, and its examples run."""

import importlib
import math
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollq.buffer.values.rollouts import Sample
from rollq.consumer import Batch, policy_loss
from rollq.consumer.losses import PRESETS, LossSettings
from support.consumer_groups import make_group, make_sample, make_segment
from support.documented_commands import ROOT
from support.tiny_qwen3 import flat_gradient, tiny_qwen3

PAGE = ROOT / "docs" / "guide" / "losses.md"
EXAMPLES = ROOT / "examples" / "losses"


def test_the_page_has_every_preset_and_no_other() -> None:
    table = PAGE.read_text("utf-8").split("## Presets")[1].split("## Parts")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(PRESETS)


def test_the_page_says_over_what_the_terms_of_a_preset_are_averaged() -> None:
    table = PAGE.read_text("utf-8").split("## Presets")[1].split("## Parts")[0]
    words = {"tokens": "token", "tokens of a sample, then samples": "sequence", "as `grpo`": "sequence"}
    rows = re.findall(r"^\| `(\w+)`.*? \| ([^|]+) \| [^|]+ \|$", table, re.MULTILINE)
    found = {name: words.get(mean, "constant") for name, mean in rows}
    assert found == {name: LossSettings(preset=name).aggregation for name in PRESETS}


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """A module to which the page links, by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


def rewarded(response: list[int], reward: float) -> Sample:
    """A sample in two segments, whose last token has the reward."""
    last = np.array([0.0] * (len(response) - 1) + [reward], np.float32)
    segments = (
        make_segment([1, 2], [7, 8], arrays={"token_rewards": np.zeros(2, np.float32)}),
        make_segment([1, 2, 7, 8], response, arrays={"token_rewards": last}),
    )
    return make_sample(*segments, reward=reward)


def test_the_critic_of_the_page_learns_returns_and_gives_the_policy_its_advantages(code: Callable[[str], Any]) -> None:
    critic, model, head = code("critic"), tiny_qwen3(), torch.nn.Linear(32, 1)
    batch = Batch.build(1, [make_group(rewarded([3, 4, 5], 1.0)), make_group(rewarded([6], 0.0), group_id=1)])
    [micro] = batch.micro_batches(1000, padded=True, whole_samples=True)
    critic.add_gradients(model, head, batch, LossSettings(), lam=1.0)
    with torch.no_grad():
        values = critic.value_of(model, head, micro)
    rewards = torch.tensor(batch.rewards)[micro.sample_index[micro.loss_mask]]
    expected = tiny_qwen3()  # with lam = 1 and gamma = 1, advantages are reward - value
    advantages = micro.advantages.masked_scatter(micro.loss_mask, rewards - values)
    policy_loss(expected, replace(micro, advantages=advantages)).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(flat_gradient(model), flat_gradient(expected))
    assert head.bias.grad is not None
    torch.testing.assert_close(head.bias.grad[0], 0.5 * (values - rewards).mean())


def test_the_critic_of_the_page_gives_the_same_gradient_in_any_micro_batches(code: Callable[[str], Any]) -> None:
    critic, found = code("critic"), []
    groups = [make_group(rewarded([3, 4, 5], 1.0), rewarded([9] * size, 0.5), group_id=size) for size in range(1, 5)]
    for max_tokens in (20, 1000):
        model, head = tiny_qwen3(), torch.nn.Linear(32, 1)
        torch.nn.init.constant_(head.weight, 0.1)
        critic.add_gradients(model, head, Batch.build(1, groups), LossSettings(), max_tokens=max_tokens)
        found.append(flat_gradient(model))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


def test_the_pairs_of_the_page_raise_the_best_sample_over_the_worst(code: Callable[[str], Any]) -> None:
    dpo, model = code("dpo"), tiny_qwen3()
    failed, equal = make_sample(make_segment([1], [9]), reward=None), rewarded([6], 0.5)
    pair = make_group(rewarded([3], 0.0), failed, rewarded([4, 5], 1.0), rewarded([6], 0.5))
    batch = Batch.build(1, [pair, make_group(equal, equal, group_id=1)])
    assert [tuple(map(int, one)) for one in dpo.pairs_of(batch)] == [(2, 0)]
    micro = batch.to_torch()
    policy, reference = (dpo.sample_logprobs(one, micro, 6) for one in (model, tiny_qwen3(1)))
    gap = 0.1 * ((policy - reference)[2] - (policy - reference)[0])
    loss = dpo.dpo_loss(model, tiny_qwen3(1), batch)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-gap.item())), rel=1e-5)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    after = dpo.sample_logprobs(model, micro, 6)
    assert after[2] - after[0] > policy[2] - policy[0]


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "terms.py"))
    # -(1.0004 - 0.5 * 0.9997) / 2: both samples moved as far as they should
    assert capsys.readouterr().out == "-0.2503, clipped: [True, True, True]\n"
