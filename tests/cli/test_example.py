"""examples/rollq.toml documents every setting; it must not lie."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from rollq.buffer.rewards.advantages import AdvantageSettings
from rollq.buffer.rules.settings import ArchiveSettings, PayloadSettings, RedisSettings
from rollq.cli.settings.file import load_settings
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.shared_batch import BatchSettings
from rollq.cli.settings.task_settings import EvaluationSettings, TaskSettings
from rollq.cli.settings.task_tables import REMOVED, flattened
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.settings import LoraSettings, TrainerSettings
from rollq.consumer.tracker_settings import MlflowSettings, TensorBoardSettings, WandbSettings
from rollq.monitor.changes.settings import MonitorSettings
from rollq.producer.settings import ProducerSettings
from rollq.workers.http.pools import PoolSettings
from rollq.workers.settings import WorkerSettings

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollq.toml"
SECTIONS: dict[str, type[BaseModel]] = {
    "redis": RedisSettings,
    "payloads": PayloadSettings,
    "archive": ArchiveSettings,
    "tasks.sum": TaskSettings,
    "producer": ProducerSettings,
    "worker": WorkerSettings,
    "monitor": MonitorSettings,
    "trainer": TrainerSettings,
    "trainer.loss": LossSettings,
    "trainer.advantages": AdvantageSettings,
    "trainer.tensorboard": TensorBoardSettings,
    "trainer.wandb": WandbSettings,
    "trainer.mlflow": MlflowSettings,
}
EXAMPLES = {"options"}
"""Keys whose value in the file is an example and not the default."""


def documented(section: str, *, with_off: bool) -> dict[str, Any]:
    """Keys of a section as the example has them; with `with_off`, including keys that are off by default."""
    text = EXAMPLE.read_text()
    data: Any = flattened(tomllib.loads(re.sub(r"(?m)^#(\w+ = )", r"\1", text) if with_off else text))[0]
    for part in section.split("."):
        data = data[part]
    return dict(data)


def test_the_example_loads() -> None:
    settings = load_settings(EXAMPLE, {})
    assert settings.tasks["sum"].prompts == EXAMPLE.parent / "sum.jsonl"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_documented(section: str) -> None:
    further_tables = {"pools", "lora"}
    assert set(documented(section, with_off=True)) == set(SECTIONS[section].model_fields) - further_tables - set(
        REMOVED
    )


@pytest.mark.parametrize(
    ("table", "settings"), [("worker.pools.reference", PoolSettings), ("trainer.lora", LoraSettings)]
)
def test_every_key_of_a_table_that_is_off_is_documented(table: str, settings: type[BaseModel]) -> None:
    shown = EXAMPLE.read_text().split(f"#[{table}]\n")[1].split("\n\n")[0]
    found = settings.model_validate(tomllib.loads(re.sub(r"(?m)^# +", "", shown)))
    assert set(re.findall(r"(?m)^# +(\w+) = ", shown)) == set(settings.model_fields)
    for name, field in settings.model_fields.items():
        assert field.is_required() or getattr(found, name) == field.default, name


@pytest.mark.parametrize("section", SECTIONS)
def test_every_default_that_is_shown_is_the_real_one(section: str) -> None:
    model = SECTIONS[section]
    settings = model.model_validate(documented(section, with_off=False))
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if default is not PydanticUndefined and name not in EXAMPLES:
            assert getattr(settings, name) == default, name


def test_the_engines_options_are_documented_too() -> None:
    from rollq.workers.engines.transformers.engine import TransformersSettings

    options = documented("worker", with_off=True)["options"]
    assert set(options) == set(TransformersSettings.model_fields)
    assert TransformersSettings(**options) == TransformersSettings(model=Path(options["model"]))


@pytest.mark.parametrize("model", [*SECTIONS.values(), EvaluationSettings, BatchSettings, PoolSettings, RollqSettings])
def test_every_setting_has_a_description(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


def test_every_section_is_documented() -> None:
    sections = {section.partition(".")[0] for section in SECTIONS}
    assert set(RollqSettings.model_fields) == sections | {"run", "seed", "batch", "evaluations"}
    assert "\n#[batch]\n" in EXAMPLE.read_text()
    assert set(load_settings(EXAMPLE, {}).evaluations) == {"held_out"}
