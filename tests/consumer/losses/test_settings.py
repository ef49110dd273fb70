"""Losses by name, and what differs from them: a setting that was given is used, or refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.file import load_settings
from rollq.consumer.losses import PRESETS, LossSettings
from rollq.consumer.settings import TrainerSettings

FILE = """
run = "sums"
[tasks.math]
prompts = "p.jsonl"
batch_groups = 2
[trainer]
model = "model"
output = "trainer"
steps = 3
micro_batch_tokens = 16384
"""


def trainer(loss: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"model": "m", "output": "o", "steps": 3, "loss": loss})


def loaded(folder: Path, more: str) -> LossSettings:
    (folder / "rollq.toml").write_text(FILE + more)
    settings = load_settings(folder / "rollq.toml", {}).trainer
    assert settings is not None
    return settings.loss


def test_a_loss_is_chosen_by_name_or_in_a_table(tmp_path: Path) -> None:
    named = loaded(tmp_path, 'loss = "gspo"\n')
    assert named == loaded(tmp_path, '[trainer.loss]\npreset = "gspo"\n')
    assert (named.ratio, named.aggregation, named.clip_high) == ("sequence", "sequence", 4e-4)
    changed = loaded(tmp_path, '[trainer.loss]\npreset = "gspo"\nclip_high = 0.001\n')
    assert (changed.clip_low, changed.clip_high) == (3e-4, 0.001)


def test_the_default_is_clipped_ppo_with_the_mean_over_tokens() -> None:
    assert trainer({}).loss == trainer("ppo").loss == LossSettings()
    found = LossSettings()
    assert (found.surrogate, found.ratio, found.aggregation) == ("clipped", "token", "token")
    assert (found.clip_low, found.clip_high, found.kl_coefficient, found.mask) == (0.2, 0.2, 0, "none")
    assert not found.is_corrected
    assert not found.needs_whole_samples


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_only_what_it_uses_and_its_dump_is_valid(name: str) -> None:
    settings = LossSettings(preset=name)
    assert set(PRESETS[name]) <= settings.used
    assert all(getattr(settings, key) == value for key, value in PRESETS[name].items())
    dump = settings.model_dump()
    assert set(dump) == settings.used
    assert LossSettings.model_validate(dump) == settings


def test_losses_that_compare_whole_samples_say_so() -> None:
    whole = {name for name in PRESETS if LossSettings(preset=name).needs_whole_samples}
    assert whole == {"gspo", "gmpo", "topr", "mis", "geometric_mis"}
    assert LossSettings(mask="opsm").needs_whole_samples


WRONG = {
    'loss = "gspoo"': r"trainer\.loss = 'gspoo': unknown loss, did you mean 'gspo'\? rollq has ppo, grpo,",
    "loss = 3": r"trainer\.loss = 3: must be a table",
    'loss.preset = "nothing"': r"trainer\.loss: preset = 'nothing': unknown loss; rollq has ppo, grpo,",
    'loss = { preset = "gspo", ratio_cap = 3.0 }': r"ratio_cap = 3\.0: loss 'gspo' .*leave it out\. It uses "
    "preset, surrogate, ratio, aggregation, clip_low, ",
    "loss.importance_cap = 3.0": r"importance_cap = 3\.0: .*set old_logprobs = \"recomputed\"",
    'loss = { preset = "topr", old_logprobs = "recomputed" }': r"old_logprobs = 'recomputed': loss 'topr'.*leave",
    'loss = { preset = "ipo", importance_cap = 3.0 }': r"importance_cap = 3\.0: loss 'ipo'.* use it; leave it out",
    "loss.constant_tokens = 9": r"constant_tokens = 9: .*set aggregation = \"constant\" too",
    'loss.kl = "k2"': r"kl = 'k2': .*set kl_coefficient > 0 too",
    "loss.mask_low = 0.9": r"mask_low = 0\.9: .*set mask = \"geometric\" too",
    'loss = { preset = "icepop", old_logprobs = "behaviour" }': r"old_logprobs = \"behaviour\": loss 'icepop' corrects",
    'loss = { preset = "icepop", importance_floor = 6.0 }': r"importance_floor = 6\.0: must not exceed importance_cap",
    "loss.clip_hig = 0.3": r"trainer\.loss\.clip_hig: unknown key; did you mean 'clip_high'\?",
    'loss = { preset = "gspo", clip_high = -1.0 }': r"trainer\.loss\.clip_high = -1\.0: ",
    "loss.sft.maths = 1.0": r"trainer\.loss\.sft: 'maths' is not a task; the tasks are math",
    "loss.distillation.maths = 1.0": r"trainer\.loss\.distillation: 'maths' is not a task; the tasks are math",
    "loss = { sft = { math = 1.0 }, distillation = { math = 1.0 } }": r"sft and distillation both name task 'math'",
    'loss.surrogate = "custom"': r'surrogate = "custom": loss \'ppo\' has another; .*preset = "module.function"',
    'loss = { preset = "my.loss", surrogate = "sapo" }': r"surrogate = \"sapo\": loss 'my\.loss' has another",
    'loss = { preset = "my.loss", clip_low = 0.1 }': r"clip_low = 0\.1: loss 'my\.loss' .*leave it out",
    "loss.sft.math = -1.0": r"trainer\.loss\.sft\.math = -1\.0: ",
}
"""Lines of `[trainer]` -> the error."""


@pytest.mark.parametrize("more", WRONG)
def test_a_wrong_setting_is_refused_as_it_was_written_with_the_remedy(tmp_path: Path, more: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[more]) as caught:
        loaded(tmp_path, more)
    assert "\n" not in str(caught.value)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        LossSettings().clip_low = 0.1


def test_every_setting_is_used_by_some_loss() -> None:
    variants: list[dict[str, Any]] = [
        *({"preset": name} for name in PRESETS),
        {"kl_coefficient": 0.1},
        {"mask": "opsm"},
        {"distillation": {"chat": 1.0}},
    ]
    used = frozenset().union(*(LossSettings.model_validate(one).used for one in variants))
    assert used == set(LossSettings.model_fields)
