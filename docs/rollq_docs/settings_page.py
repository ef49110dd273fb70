"""Reference of `rollq.toml`: every key with its type, default and meaning, from the models that check it."""

import enum
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from rollq.buffer.rewards.advantages import AdvantageSettings
from rollq.buffer.rules.settings import ArchiveSettings, PayloadSettings, RedisSettings
from rollq.cli.settings.model import EvaluationSettings, RollqSettings, TaskSettings
from rollq.cli.settings.shared_batch import BatchSettings, BatchStep
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.settings import LoraSettings, NcclSettings, TrainerSettings
from rollq.consumer.tracker_settings import MlflowSettings, TensorBoardSettings, WandbSettings
from rollq.producer.settings import ProducerSettings
from rollq.workers.agents.multi_turn import EnvironmentSettings
from rollq.workers.agents.tool_environment import ToolsSettings
from rollq.workers.agents.tools import ToolSettings
from rollq.workers.engines.registry import ENGINES
from rollq.workers.engines.vllm.settings import VllmSettings
from rollq.workers.gateway.harnesses.local import HarnessSettings
from rollq.workers.gateway.harnesses.remote import OutsideSettings
from rollq.workers.http.pools import PoolSettings
from rollq.workers.judging.options import HttpOptions, Part, RegexOptions, WeightedOptions
from rollq.workers.settings import GatewaySettings, WorkerSettings
from rollq_docs.markdown import cell, code, table

TABLES: Mapping[str, type[BaseModel]] = {
    "[redis]": RedisSettings,
    "[payloads]": PayloadSettings,
    "[archive]": ArchiveSettings,
    "[tasks.NAME]": TaskSettings,
    "[tasks.NAME.judge_options], judge regex": RegexOptions,
    "[tasks.NAME.judge_options], judge http": HttpOptions,
    "[tasks.NAME.judge_options], judge weighted": WeightedOptions,
    "[tasks.NAME.judge_options.parts.PART]": Part,
    "[tasks.NAME.agent_options], loop tools": ToolsSettings,
    "[tasks.NAME.agent_options.tools.TOOL]": ToolSettings,
    "[tasks.NAME.agent_options], loop environment": EnvironmentSettings,
    "[tasks.NAME.agent_options], loop harness": HarnessSettings,
    "[tasks.NAME.agent_options], loop outside": OutsideSettings,
    "[batch]": BatchSettings,
    "[batch] schedule": BatchStep,
    "[evaluations.NAME]": EvaluationSettings,
    "[producer]": ProducerSettings,
    "[worker]": WorkerSettings,
    "[worker.gateway]": GatewaySettings,
    "[worker.pools.NAME]": PoolSettings,
    "[trainer]": TrainerSettings,
    "[trainer.loss]": LossSettings,
    "[trainer.advantages]": AdvantageSettings,
    "[trainer.lora]": LoraSettings,
    "[trainer.nccl]": NcclSettings,
    "[trainer.tensorboard]": TensorBoardSettings,
    "[trainer.wandb]": WandbSettings,
    "[trainer.mlflow]": MlflowSettings,
}
"""Table of `rollq.toml` -> its model, in the order of the page."""
NOT_INSTALLED: Mapping[str, type[BaseModel]] = {"vllm": VllmSettings}
"""Engines whose module needs a package that the site's environment lacks."""
UNITS = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_tokens": "tokens", "_steps": "train steps"}
"""End of a key -> its unit."""
HEAD = ("key", "type", "default", "meaning")
WORDS: Mapping[Any, str] = {
    bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "text", Any: "any",
    list[str]: "list of texts",
}  # fmt: skip
SUBJECTS = {
    "PromptSettings": "Prompts",
    "PromptLength": "Prompts",
    "ProducerTask": "Production",
    "JudgeSettings": "Judging",
    "SamplingSettings": "Sampling",
    "RolloutSettings": "Agent loops",
    "GroupRules": "Groups",
    "TaskRules": "Batches, staleness, restarts",
    "WorkerTask": "Scorers, filters, overlong answers",
    "TaskSettings": "Shards",
}
"""Class that defines keys of a task -> their subject, in the order of the page."""
INTRODUCTION = """\
# Settings

Every key of `rollq.toml`, from the models that check it. All roles read the same file. Unknown keys, and values outside
of the types below, are refused with an error that names them. [The example](../../examples/rollq.toml) has all of
them in a file, with the environment variables that override it.

"""


def settings_page() -> str:
    """The page."""
    top = {name: field for name, field in RollqSettings.model_fields.items() if name in ("run", "seed")}
    parts = [INTRODUCTION, _section("Top level", "Before the first table.", _rows(top))]
    for name, model in {**TABLES, **_engines()}.items():
        if model is TaskSettings:
            parts.append(f"## {name}\n\n{getdoc(model)} Its keys, by subject:\n\n")
            parts += [_section(title, "", rows, level=3) for title, rows in _by_subject(model).items()]
        elif model is EvaluationSettings:
            parts.append(f"## {name}\n\n{_evaluations()}\n\n")
        else:
            parts.append(_section(name, getdoc(model) or "", _rows(_fields(model))))
    return "".join(parts)


def table_of(model: type[BaseModel]) -> str:
    """All keys of a model."""
    return table(HEAD, _rows(model.model_fields))


def _engines() -> dict[str, type[BaseModel]]:
    """Section -> model of the options of each engine."""
    found = {}
    for name, (module, _, settings, _) in ENGINES.items():
        model = NOT_INSTALLED.get(name) or getattr(import_module(module), settings)
        found[f"[worker.options], engine {name}"] = model
    return found


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The keys of a table that are not tables, each with a section."""
    tables = set(TABLES.values())
    return {name: field for name, field in model.model_fields.items() if field.annotation not in tables}


def _section(title: str, text: str, rows: Iterable[tuple[str, ...]], *, level: int = 2) -> str:
    return f"{'#' * level} {title}\n\n{text}\n\n{table(HEAD, rows)}\n"


def _by_subject(model: type[BaseModel]) -> dict[str, list[tuple[str, ...]]]:
    """Subject -> the rows of its keys. Raises `KeyError` for a class of keys without a subject."""
    found: dict[str, list[tuple[str, ...]]] = {subject: [] for subject in SUBJECTS.values()}
    left = dict(model.model_fields)
    for part in reversed(model.__mro__):
        if own := set(getattr(part, "__annotations__", {})) & set(left):
            found[SUBJECTS[part.__name__]] += _rows(
                {name: left.pop(name) for name in model.model_fields if name in own}
            )
    return found


def _evaluations() -> str:
    left_out = sorted(set(TaskSettings.model_fields) - set(EvaluationSettings.model_fields))
    return f"{getdoc(EvaluationSettings)}\n\nThe keys of a task, but for {', '.join(f'`{name}`' for name in left_out)}."


def _rows(fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, ...]]:
    for name, field in fields.items():
        unit = next((f", {unit}" for end, unit in UNITS.items() if name.endswith(end)), "")
        kind = f"{_kind(field.annotation)}{_bounds(field.metadata)}{unit}"
        yield code(name), cell(kind), _default(field), cell(field.description or "")


def _kind(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"list of {_kind(arguments[0])}"
        return f"[{', '.join(map(_kind, arguments))}]"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(f'"{member.value}"' for member in annotation)
    return WORDS[annotation]


def _bounds(metadata: Iterable[Any]) -> str:
    """The values that are allowed."""
    signs = {annotated_types.Gt: (">", "gt"), annotated_types.Ge: (">=", "ge"), annotated_types.Le: ("<=", "le"),
             annotated_types.Lt: ("<", "lt")}  # fmt: skip
    found = [(signs[type(rule)], rule) for rule in metadata if type(rule) in signs]
    return " and".join(f" {sign} {getattr(rule, name):,}" for (sign, name), rule in found)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    value = value.value if isinstance(value, enum.Enum) else value
    return code(json.dumps(value, default=str))
