"""The engines that ship with rollq, by name. Their modules are imported on demand: only `transformers` needs torch,
only `vllm` needs vLLM, and only `openai` and `sglang` need aiohttp.

A worker's settings name an engine in this table. Each engine's settings class checks its options.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from pydantic import ValidationError

from rollq.buffer.errors import ConfigError
from rollq.buffer.settings_errors import explanation
from rollq.workers.engines.protocol import Engine

_ENGINES = "rollq.workers.engines"
ENGINES: Mapping[str, tuple[str, str, str, str]] = {
    "transformers": (f"{_ENGINES}.transformers.engine", "TransformersEngine", "TransformersSettings", "torch"),
    "simulated": (f"{_ENGINES}.simulated", "SimulatedEngine", "SimulatedSettings", "torch"),
    "vllm": (f"{_ENGINES}.vllm.engine", "VllmEngine", "VllmSettings", "vllm"),
    "openai": (f"{_ENGINES}.openai.engine", "OpenAIEngine", "OpenAISettings", "openai"),
    "sglang": (f"{_ENGINES}.sglang.engine", "SglangEngine", "SglangSettings", "openai"),
}
"""Name -> module, engine class, settings class, and the extra that installs its requirements."""


def make_engine(name: str, options: Mapping[str, Any]) -> Engine:
    """Make the engine called `name`, without starting it; `options` has the fields of its settings class.

    Raises `ConfigError` for an unknown name, bad options, or a package that is not installed.
    """
    if name not in ENGINES:
        raise ConfigError(f"unknown engine {name!r}: use one of {', '.join(sorted(ENGINES))}")
    module_name, engine_name, settings_name, extra = ENGINES[name]
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(f"engine {name!r} needs the package {error.name!r}: pip install 'rollq[{extra}]'") from error
    settings_class = getattr(module, settings_name)
    try:
        settings = settings_class(**options)
    except ValidationError as error:
        raise ConfigError(f"[worker.options] of engine {name!r}: {explanation(error, settings_class)}") from error
    return cast(Engine, getattr(module, engine_name)(settings))
