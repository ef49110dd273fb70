"""Every key of `rollq.toml` with its type, default and meaning, from the models that check the file."""

import enum
import json
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from inspect import getdoc
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal, Union

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from rollq.buffer.rewards.advantages import AdvantageSettings
from rollq.buffer.rules.settings import ArchiveSettings, PayloadSettings, RedisSettings, Settings
from rollq.cli.settings.model import RollqSettings
from rollq.cli.settings.shared_batch import BatchSettings, BatchStep
from rollq.cli.settings.task_settings import EvaluationSettings, TaskSettings
from rollq.cli.settings.task_tables import MAIN, REMOVED, SUBTABLES, field_of
from rollq.consumer.losses.settings import LossSettings
from rollq.consumer.settings import LoraSettings, NcclSettings, TrainerSettings
from rollq.consumer.tracker_settings import MlflowSettings, TensorBoardSettings, WandbSettings
from rollq.monitor.changes.settings import MonitorSettings
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

TASK: Final = "[tasks.NAME]"
EVALUATION: Final = "[evaluations.NAME]"
TABLES: Final[Mapping[str, type[BaseModel]]] = {
    "[redis]": RedisSettings,
    "[payloads]": PayloadSettings,
    "[archive]": ArchiveSettings,
    TASK: TaskSettings,
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
    EVALUATION: EvaluationSettings,
    "[producer]": ProducerSettings,
    "[worker]": WorkerSettings,
    "[worker.gateway]": GatewaySettings,
    "[worker.pools.NAME]": PoolSettings,
    "[monitor]": MonitorSettings,
    "[trainer]": TrainerSettings,
    "[trainer.loss]": LossSettings,
    "[trainer.advantages]": AdvantageSettings,
    "[trainer.lora]": LoraSettings,
    "[trainer.nccl]": NcclSettings,
    "[trainer.tensorboard]": TensorBoardSettings,
    "[trainer.wandb]": WandbSettings,
    "[trainer.mlflow]": MlflowSettings,
}
"""Table of `rollq.toml` -> its model, in the order of the reference."""
COMMON: Final[Mapping[str, str]] = {
    "": "run seed",
    "[redis]": "buffer_url password",
    "[payloads]": "url",
    "[archive]": "url",
    "[tasks.NAME.rows]": "prompt_field answer_field chat template_options system_prompt max_prompt_tokens max_bad_rows",
    "[tasks.NAME.judging]": "group_judge isolate_judge on_judge_error",
    "[tasks.NAME.sampling]": "top_p top_k stop",
    "[tasks.NAME.staleness]": "sync_weights_interval stragglers partial_rollout",
    "[tasks.NAME.batches]": "weight max_uses",
    "[tasks.NAME.curriculum]": "prompt_order low high",
    "[tasks.NAME.limits]": "lease_s min_valid_samples min_keep_rate",
    "[tasks.NAME.judge_options], judge regex": "pattern",
    "[tasks.NAME.judge_options], judge http": "url",
    "[tasks.NAME.judge_options], judge weighted": "parts",
    "[tasks.NAME.judge_options.parts.PART]": "judge weight",
    "[tasks.NAME.agent_options], loop tools": "tools max_turns",
    "[tasks.NAME.agent_options.tools.TOOL]": "function",
    "[tasks.NAME.agent_options], loop environment": "environment max_turns",
    "[tasks.NAME.agent_options], loop harness": "command workspace",
    "[tasks.NAME.agent_options], loop outside": "",
    "[batch]": "groups",
    "[batch] schedule": "step groups weights",
    EVALUATION: "",
    "[producer]": "strategy over_sample",
    "[worker]": "engine tokenizer name samples_in_flight swap judge_timeout_s judge_processes grace_s",
    "[worker.gateway]": "bind",
    "[worker.pools.NAME]": "urls served_model",
    "[monitor]": "on_change",
    "[trainer]": "model output steps learning_rate schedule warmup_steps gradient_clip micro_batch_tokens device dtype "
    "checkpoint_every keep_checkpoints evaluate_every transport max_mismatch updates_per_batch trackers",
    "[trainer.loss]": "preset clip_low clip_high aggregation kl_coefficient old_logprobs",
    "[trainer.advantages]": "baseline scale",
    "[trainer.lora]": "rank alpha targets",
    "[trainer.nccl]": "",
    "[trainer.tensorboard]": "folder",
    "[trainer.wandb]": "project",
    "[trainer.mlflow]": "tracking_uri experiment",
    "[worker.options], engine transformers": "model device dtype",
    "[worker.options], engine simulated": "lengths tokens_per_s",
    "[worker.options], engine vllm": "model dtype engine_args",
    "[worker.options], engine openai": "urls served_model push_model",
    "[worker.options], engine sglang": "urls push_model",
}
"""Table -> its keys that most runs set or that users should know. Other keys are advanced."""
RARE_OF_TASKS: Final = frozenset({"env_split", "env_shared"})
"""Keys of `[tasks.NAME]` that are advanced; all others are common."""
EXPERIMENTAL: Final = {"[trainer.nccl]": "", "[trainer]": "colocated replay_experts"}
"""Table -> its keys for features that have not run on a GPU yet; "" means all keys of the table."""
UNITS: Final = {"_s": "seconds", "_ms": "milliseconds", "_bytes": "bytes", "_tokens": "tokens", "_steps": "train steps"}
"""End of a key -> its unit."""
WORDS: Final[Mapping[Any, str]] = {
    bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "text", Any: "any",
    list[str]: "list of strings",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Setting:
    """One key of a table: its type and bounds in words, its default in TOML, and its meaning."""

    table: str
    key: str
    kind: str
    default: str
    meaning: str
    is_common: bool


@dataclass(frozen=True, slots=True)
class SettingsTable:
    """A table of `rollq.toml`: its subject, its keys, and why other keys were removed."""

    name: str
    about: str
    settings: tuple[Setting, ...]
    removed: Mapping[str, str] = field(default_factory=dict)


def reference() -> list[SettingsTable]:
    """All tables except engines' options."""
    top = {name: RollqSettings.model_fields[name] for name in ("run", "seed")}
    tables = [SettingsTable("", "Before the first table.", tuple(_settings("", top)))]
    for name, model in TABLES.items():
        if model is TaskSettings:
            tables += _task_tables()
        elif model is EvaluationSettings:
            tables.append(SettingsTable(name, _about_evaluations(), ()))
        else:
            tables.append(_table(name, model))
    return tables


def _table(name: str, model: type[BaseModel]) -> SettingsTable:
    fields = {key: field for key, field in model.model_fields.items() if field.annotation not in _MODELS}
    return SettingsTable(name, getdoc(model) or "", tuple(_settings(name, fields)), _removed(model))


def engine_reference() -> list[SettingsTable]:
    """The options of each engine whose package is installed."""
    tables = []
    for engine, (module, _, class_name, _) in ENGINES.items():
        name = f"[worker.options], engine {engine}"
        with suppress(ModuleNotFoundError):
            model = VllmSettings if engine == "vllm" else getattr(import_module(module), class_name)
            settings = tuple(_settings(name, model.model_fields))
            tables.append(SettingsTable(name, getdoc(model) or "", settings, _removed(model)))
    return tables


def _removed(model: type[BaseModel]) -> Mapping[str, str]:
    return model.REMOVED if issubclass(model, Settings) else {}


def rows_of(model: type[BaseModel]) -> Iterator[Setting]:
    """The keys of a model without a table in the file."""
    return _settings("", model.model_fields)


_MODELS: Final = set(TABLES.values())
_ABOUT: Final = {
    "rows": "How the rows of the file of prompts become prompts.",
    "judging": "What happens to a finished sample.",
    "sampling": "How the tokens of a sample are drawn. For a trained task, only what the trainer's logprobs follow.",
    "staleness": "How old samples may become, where it differs from the profile.",
    "batches": "What the batch of a train step takes, and how long it is kept.",
    "curriculum": "Which prompts come next.",
    "limits": "When a group, a worker or a task is given up.",
}


def _task_tables() -> Iterator[SettingsTable]:
    fields = TaskSettings.model_fields
    main = {key: fields[key] for key in MAIN}
    about = f"{getdoc(TaskSettings)} Its other keys are in tables by subject, as in `sampling.top_p = 0.9`."
    yield SettingsTable(TASK, about, tuple(_settings(TASK, main)), REMOVED)
    for table, keys in SUBTABLES.items():
        name = f"[tasks.NAME.{table}]"
        yield SettingsTable(
            name, _ABOUT[table], tuple(_settings(name, {key: fields[field_of(table, key)] for key in keys}))
        )


def _about_evaluations() -> str:
    left_out = [
        f"{table}.{key}" if table else key
        for table, keys in {"": MAIN, **SUBTABLES}.items()
        for key in keys
        if field_of(table, key) not in EvaluationSettings.model_fields
    ]
    keys = ", ".join(f"`{key}`" for key in left_out)
    return f"{getdoc(EvaluationSettings)} It has the tables and keys of a task, except {keys}."


def _settings(table: str, fields: Mapping[str, FieldInfo]) -> Iterator[Setting]:
    common = fields.keys() - RARE_OF_TASKS if table == TASK else COMMON.get(table, "").split()
    experimental = EXPERIMENTAL[table].split() or list(fields) if table in EXPERIMENTAL else []
    for key, given in fields.items():
        kind = f"{_kind(given.annotation)}{_bounds(given.metadata)}{_unit(key)}"
        meaning = f"{'experimental: ' if key in experimental else ''}{given.description or ''}"
        yield Setting(table, key, kind, _default(given), meaning, key in common)


def _unit(key: str) -> str:
    return next((f", {unit}" for end, unit in UNITS.items() if key.endswith(end)), "")


def _kind(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return " or ".join(map('"{}"'.format, arguments))
    if origin in (Union, UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return _tuple_kind(*arguments)
    return "table" if origin is dict else _class_kind(annotation)


def _tuple_kind(*items: Any) -> str:
    if items[-1] is Ellipsis:
        return f"list of {_kind(items[0])}"
    return f"[{', '.join(map(_kind, items))}]"


def _class_kind(annotation: Any) -> str:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return " or ".join(f'"{member.value}"' for member in annotation)
    return WORDS[annotation]


def _bounds(metadata: Iterable[Any]) -> str:
    """The allowed values."""
    signs = {annotated_types.Gt: (">", "gt"), annotated_types.Ge: (">=", "ge"), annotated_types.Le: ("<=", "le"),
             annotated_types.Lt: ("<", "lt")}  # fmt: skip
    bounds = [(signs[type(rule)], rule) for rule in metadata if type(rule) in signs]
    return " and".join(f" {sign} {getattr(rule, name):,}" for (sign, name), rule in bounds)


def _default(field: FieldInfo) -> str:
    """The default in JSON, which is also TOML; `required`; or `none`."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    return json.dumps(value.value if isinstance(value, enum.Enum) else value, default=str)
