"""Opens an environment of verifiers by a worker's specification, and refuses environments that cannot be trained."""

import difflib
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env
from verifiers.v1.utils import loaders

from rollq.environments.verifiers.runner import inside
from rollq.environments.verifiers.runner.toolsets import problem_of, toolsets_of

INSIDE = "inside"
"""The harness whose loop runs in this process."""
_MODULE = "rollq_inside"
"""The module name by which verifiers imports this harness."""
sys.modules[_MODULE] = inside


class SpecError(Exception):
    """An environment that does not exist, or that cannot be trained."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An environment, and the name of the trained seat."""

    env: Env[Any]
    seat: str


def opened(spec: Mapping[str, Any]) -> Opened:
    """The environment of `spec`: its `taskset`, `config`, `harness` and `split`. Raises `SpecError`."""
    taskset, data = spec["taskset"], dict(spec["config"])
    try:
        loaders.taskset_class(taskset)
        config_class = loaders.env_config_type(taskset, data.get("id", ""))
        seat = _trained_seat(config_class, data)
        env = loaders.load_environment(_config(config_class, spec, data, seat))
    except SpecError:
        raise
    except ModuleNotFoundError as error:
        raise SpecError(f"{error}{_nearest(taskset)}") from error
    except Exception as error:
        raise SpecError(f"{type(error).__name__}: {error}") from error
    if problem := next(filter(None, map(problem_of, toolsets_of(env))), ""):
        raise SpecError(problem)
    return Opened(env, seat)


def _trained_seat(config_class: type[EnvConfig], data: Mapping[str, Any]) -> str:
    """The only seat without a separate client."""
    seats = {name: field.default for name, field in config_class.model_fields.items()}
    played = [name for name, seat in seats.items() if isinstance(seat, AgentConfig) and not seat.client]
    trained = [name for name in played if not data.get(name, {}).get("client")]
    if len(trained) == 1:
        return trained[0]
    if trained:
        raise SpecError(
            f"the model would play {len(trained)} seats ({', '.join(trained)}), but a sample trains one: give the "
            f"others a model in env_options.config, such as {trained[-1]} = "
            f"{{ model = ..., client = {{ base_url = ... }} }}"
        )
    raise SpecError("every seat has a separate client, so there is nothing to train")


def _config(config_class: type[EnvConfig], spec: Mapping[str, Any], data: dict[str, Any], seat: str) -> EnvConfig:
    taskset = {**data.get("taskset", {}), "id": spec["taskset"]}
    if "split" in loaders.taskset_config_type(spec["taskset"]).model_fields:
        taskset.setdefault("split", spec["split"])
    player = {"runtime": {"type": "subprocess"}, **data.get(seat, {})}
    if spec["harness"]:
        harness = _MODULE if spec["harness"] == INSIDE else spec["harness"]
        player["harness"] = {"id": harness, **player.get("harness", {})}
    return config_class.model_validate({**data, "taskset": taskset, seat: player, "interception": {"type": "server"}})


def _nearest(taskset: str) -> str:
    """The end of the message for an unknown task set: similar names."""
    names = [module.name for module in pkgutil.iter_modules()]
    from verifiers.v1 import tasksets

    names += [module.name for module in pkgutil.iter_modules(tasksets.__path__)]
    near = difflib.get_close_matches(taskset.replace("-", "_"), names, cutoff=0.75)
    return f" Did you mean {', '.join(near)}?" if near else ""
