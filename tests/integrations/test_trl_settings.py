"""TRL's settings under `RollqGRPOTrainer`: each is exact however a batch is divided, without effect, or refused."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TrainingArguments

from rollq.buffer.errors import ConfigError, InvalidGroup
from rollq.consumer import Batch
from rollq.integrations import trl
from rollq.integrations.trl.limits import EXACT, REFUSED, UNUSED, check_batch
from support.consumer_groups import VOCABULARY, make_group, make_sample, make_segment
from support.model_families import make_model
from support.trl_runs import Norms, config


def own_settings() -> set[str]:
    """The settings that TRL adds to those of transformers."""
    from trl import GRPOConfig

    return {one.name for one in fields(GRPOConfig)} - {one.name for one in fields(TrainingArguments)}


def test_every_setting_of_trl_is_exact_without_effect_or_refused() -> None:
    kinds = (EXACT, UNUSED, REFUSED)
    assert sorted(name for kind in kinds for name in kind) == sorted(own_settings())


def test_the_page_about_trl_names_each_setting_that_has_an_effect() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "trl.md").read_text("utf-8")
    table = page[page.index("| effect | settings |") : page.index("Of transformers' settings")]
    assert set(re.findall(r"`(\w+)`", table)) - {"dr_grpo"} == {*EXACT, *REFUSED}


def norm_of(model: Path, folder: Path, micro_batches: int, changed: dict[str, Any]) -> float:
    args = config(folder, max_steps=1, gradient_accumulation_steps=micro_batches, save_strategy="no", **changed)
    norms = Norms()
    trainer = trl.RollqGRPOTrainer(str(model), args, MadeBatches(), max_tokens=400, callbacks=[norms])  # type: ignore[arg-type]
    trainer.train()
    return norms.by_step["1"]


class MadeBatches:
    """Batches without a server, in place of a consumer."""

    epoch, lineage, replayed_through, sync_weights_interval, step = 0, "lineage", 0, 1, 1

    def __next__(self) -> Batch:
        draws = np.random.default_rng(self.step)

        def sample(index: int) -> Any:
            response = draws.integers(2, VOCABULARY, draws.integers(2, 12)).tolist()
            logprobs = draws.normal(-3.4, 0.3, len(response)).tolist()
            return make_sample(make_segment([2, 3], response, logprobs=logprobs), reward=float(index))

        groups = [make_group(*map(sample, range(4)), group_id=number) for number in range(2)]
        return Batch.build(self.step, groups, reduction="mean")

    def publish(self, *_: object, **__: object) -> int:
        return 0

    def commit(self, batch: Batch) -> None:
        self.step = batch.step + 1

    def report(self, facts: object) -> None:
        pass


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"loss_type": "cispo", "epsilon_high": 3.0},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"loss_type": "dr_grpo", "max_completion_length": 64},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False},
        {"epsilon": 0.01, "epsilon_high": 0.02},
        {"delta": 1.1},
        {"off_policy_mask_threshold": 0.05},
    ],
    ids=str,
)
def test_settings_that_are_exact_have_one_gradient_however_the_batch_is_divided(
    changed: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    whole, divided = (norm_of(model_folder, tmp_path, count, changed) for count in (1, 4))
    assert divided == pytest.approx(whole, rel=1e-4)


def test_weights_that_would_lose_their_updates_are_warned_of(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args = config(tmp_path, model_init_kwargs={"dtype": "bfloat16"})
    trl.RollqGRPOTrainer(str(model_folder), args, MadeBatches(), max_tokens=400)  # type: ignore[arg-type]
    assert "the model has weights in bfloat16, whose updates are rounded away" in caplog.text


def test_a_mixture_of_experts_is_refused_with_its_balancing_loss(tmp_path: Path) -> None:
    mixture = make_model(tmp_path / "mixture", "qwen3_moe", 0)
    args = config(tmp_path, router_aux_loss_coef=0.01)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef = 0\.01: set it to 0: the balancing loss"):
        trl.RollqGRPOTrainer(str(mixture), args, MadeBatches(), max_tokens=400)  # type: ignore[arg-type]
    trl.RollqGRPOTrainer(str(mixture), config(tmp_path, router_aux_loss_coef=0), MadeBatches(), max_tokens=400)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"loss_type": "grpo"}, "loss_type = 'grpo' treats"),
        ({"importance_sampling_level": "sequence"}, "importance_sampling_level = 'sequence' treats"),
        ({"off_policy_mask_threshold": 0.1}, "off_policy_mask_threshold = 0.1 treats"),
    ],
    ids=str,
)
def test_settings_that_compare_rows_are_refused_for_samples_of_several_segments(
    changed: dict[str, Any], named: str, tmp_path: Path
) -> None:
    segments = [make_segment([2, 3], [4, 5]), make_segment([2, 3, 4], [6])]
    batch = Batch.build(1, [make_group(make_sample(*segments, reward=1.0), make_sample(segments[0], reward=0.0))])
    check_batch(batch, config(tmp_path))
    with pytest.raises(InvalidGroup, match=f"step 1 has samples of several segments, and GRPOConfig {named}"):
        check_batch(batch, config(tmp_path, **changed))
