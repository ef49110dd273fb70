"""Compares LoRA adapters on disk, in PEFT's format, with the model that they are for. Only reads files, without vLLM.

vLLM serves an adapter that lacks layers without an error, with the model's weights alone in these layers.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollq.buffer.errors import WeightsError
from rollq.buffer.weights.manifest import ADAPTER_CONFIG
from rollq.workers.engines.tensors import Tensors, few, read_tensors

_PREFIX = "base_model.model."
_MATRIX = re.compile(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
"""A tensor's name: the adapted module, and which of the module's two matrices the tensor is."""
_WRAPPER = ".base_layer"
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""The number of a layer or an expert in a module's name."""

Names = re.Pattern[str] | frozenset[str]
"""Module names in a configuration: a pattern for whole names, or a list of names and last parts."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The modules that an adapter's configuration names.

    `targets` is None if modules are not chosen by name ("all-linear"). `layers` holds the adapted layers' numbers, or
    None for all layers. `layers_patterns` holds expressions for the text before such a number.
    """

    targets: Names | None
    excluded: Names
    layers: frozenset[int] | None
    layers_patterns: tuple[str, ...]

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """Read the configuration of the adapter in `folder`. Raises `WeightsError` if this fails."""
        path = folder / ADAPTER_CONFIG
        try:
            config: dict[str, Any] = orjson.loads(path.read_bytes())
            targets, layers = config.get("target_modules"), config.get("layers_to_transform")
            patterns = _listed(config.get("layers_pattern") or ())
            return cls(
                None if targets in (None, "all-linear") else _names(targets),
                _names(config.get("exclude_modules") or ()),
                None if layers is None else frozenset(_listed(layers)),
                tuple(map(re.escape, patterns)) or ("[^.]*",),
            )
        except (OSError, orjson.JSONDecodeError, re.error, AttributeError, TypeError) as error:
            raise WeightsError(
                f"adapter configuration {str(path)!r} cannot be read: {error}; publish it again"
            ) from error

    def targets_module(self, module: str) -> bool:
        """Whether `targets` names the module."""
        return self.targets is not None and _match(self.targets, module)

    def allows(self, module: str) -> bool:
        """Whether the module is in an adapted layer and not excluded."""
        return not _match(self.excluded, module) and (self.layers is None or self._layer(module) in self.layers)

    def _layer(self, module: str) -> int | None:
        """The module's layer number, as PEFT counts: the last number after a match of a pattern."""
        for pattern in self.layers_patterns:
            if match := re.match(rf".*\.{pattern}\.(\d+)\.", module):
                return int(match[1])
        return None


def check_adapter(folder: Path, model: Tensors, layers: int) -> None:
    """Raise `WeightsError` unless the adapter in `folder` adapts every module that the adapter's configuration names.

    `model` has the tensors in the model's files. `layers` is the number of adapted layers; further layers in the files,
    for multi-token prediction, are not adapted. If the configuration names no modules, a module that is adapted in one
    layer must be adapted in every layer that has it.
    """
    config, adapted = AdapterConfig.read(folder), _adapted_modules(folder)
    missing = lacking_modules(config, adapted, _modules(model, layers))
    if missing or not adapted:
        raise WeightsError(
            f"adapter {str(folder)!r} lacks {few(missing) if adapted else 'all modules'}, which its configuration "
            "names: publish it with the tensors of all layers"
        )


def lacking_modules(config: AdapterConfig, adapted: Collection[str], modules: Iterable[str]) -> list[str]:
    """The sorted modules that an adapter should adapt and does not, under the adapter's names.

    Experts count only if the adapter has tensors for experts: transformers fuses experts, which hides them from PEFT.
    """
    named = _as_adapted(adapted, modules)
    done = {stack + place for stack, places in _stacks(adapted).items() for place in places}
    kinds, undecided = set(map(_kind, done)), {_kind(module) for module in done if not config.targets_module(module)}

    def wanted(module: str) -> bool:
        kind = _kind(module)
        expert = kind.count("*") > 1
        return kind in undecided or (config.targets_module(module) and (not expert or kind in kinds))

    return sorted(module for module in named - done if config.allows(module) and wanted(module))


def _as_adapted(adapted: Iterable[str], modules: Iterable[str]) -> set[str]:
    """The modules outside stacks and in adapted stacks, under the adapter's names for the stacks.

    Names may differ between files and memory. An unknown stack is matched with the stack with which it shares most
    modules.
    """
    stacks = _stacks(modules)
    return {
        stack + place
        for stack, targets in _stacks(adapted).items()
        for place in stacks.get(stack) or max(stacks.values(), key=lambda places: (len(places & targets), len(places)))
    }


def _stacks(modules: Iterable[str]) -> dict[str, set[str]]:
    """Modules by stack of layers: `model.layers.` -> `0.mlp.up_proj`, and `` -> the last part of other names."""
    stacks: dict[str, set[str]] = {"": set()}
    for module in modules:
        if number := _NUMBER.search(module):
            stacks.setdefault(module[: number.start()], set()).add(module[number.start() :])
        else:
            stacks[""].add(module.rpartition(".")[2])
    return stacks


def _kind(module: str) -> str:
    """The module's name without numbers, which is the same in all layers."""
    return _NUMBER.sub("*", module)


def _adapted_modules(folder: Path) -> set[str]:
    """The names of modules with tensors in an adapter's file. Raises `WeightsError` if one of a module's two matrices
    is missing."""
    matrices_of: dict[str, set[str]] = {}
    for name in read_tensors(folder):
        name = name.removeprefix(_PREFIX)
        if matrix := _MATRIX.fullmatch(name):
            matrices_of.setdefault(matrix[1].replace(_WRAPPER, ""), set()).add(matrix[2])
        else:  # a whole module (modules_to_save)
            matrices_of[name.removesuffix(".weight")] = {"A", "B"}
    if halves := sorted(module for module, matrices in matrices_of.items() if len(matrices) < 2):
        raise WeightsError(
            f"adapter {str(folder)!r} has only one of the matrices A and B of {few(halves)}: publish both"
        )
    return set(matrices_of)


def _modules(model: Tensors, layers: int) -> set[str]:
    """The names of a model's modules up to the last layer, including modules that contain others."""
    modules = set()
    for name in model:
        number = _NUMBER.search(name)
        if number is None or int(number[0]) < layers:
            while name := name.rpartition(".")[0]:
                modules.add(name)
    return modules


def _names(value: str | Iterable[str]) -> Names:
    return re.compile(value) if isinstance(value, str) else frozenset(value)


def _listed(value: Any) -> list[Any]:
    """Return the list `value`, or a list with `value` as its only entry."""
    return [value] if isinstance(value, str | int) else list(value)


def _match(names: Names, module: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
