"""User code, named in local configuration by a built-in's name or a dotted path. Never from Redis."""

import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from rollq.buffer.errors import ConfigError


def load_plugin(kind: str, name: str, builtins: Mapping[str, Any]) -> Any:
    """Return the built-in called `name`, or the object at the dotted path `package.module.attribute`.

    Raises `ConfigError` naming `kind` ("judge", "agent loop") if the object does not exist or cannot be called, or if
    its module cannot be imported.
    """
    if name in builtins:
        return builtins[name]
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not all(name.split(".")):
        named = "".join(f"{builtin}, " for builtin in sorted(builtins))
        raise ConfigError(f"{kind} {name!r}: use {named}{'or ' if named else ''}a dotted path")
    found = _imported(f"{kind} {name!r}", module_name, attribute)
    if not callable(found):
        raise ConfigError(f"{kind} {name!r} is {found!r:.80}: must be a function or a class")
    return found


def _imported(what: str, module_name: str, attribute: str) -> Any:
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: cannot import {module_name!r}: {_reason(error)}") from error
    if not hasattr(module, attribute):
        file = getattr(module, "__file__", None) or "built into Python"
        raise ConfigError(f"{what}: module {module_name!r} ({file}) has no {attribute!r}")
    return getattr(module, attribute)


def _reason(error: BaseException) -> str:
    """Why a module cannot be imported, with the location of an error that the module itself raises."""
    match error:
        case ImportError():
            return str(error)
        case SyntaxError():
            return f"{error.msg} ({error.filename}:{error.lineno})"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
