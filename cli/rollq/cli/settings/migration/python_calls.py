"""Evaluates the calls in a Python file of settings: functions of the file, classes of settings, and methods."""

import ast
import copy
from collections.abc import Callable, Mapping
from itertools import takewhile
from typing import Any, Final

from rollq.cli.settings.migration.expressions import FUNCTIONS, METHODS, whole, with_keys
from rollq.cli.settings.migration.python_state import Returned, Scope, either
from rollq.cli.settings.migration.python_values import MOST_NODES, Expressions, Frame, TooMuch, source
from rollq.cli.settings.migration.values import REST, Function, Made, Named, Several, Unknown

MOST_CALLS: Final = 10
PURE: Final = frozenset(
    {
        "print", "isinstance", "issubclass", "hasattr", "getattr", "type", "repr", "sorted", "sum", "any", "all",
        "open", "round", "abs", "vars", "id", "format", "callable", "set", "frozenset", "map", "filter", "reversed",
        "next", "iter", "hash", "partial", "model_dump", "model_dump_json", "build", "info", "warning", "debug",
        "error", "dumps", "dump", "count", "index", "exists", "mkdir", "makedirs", "is_available",
    }
)  # fmt: skip
"""Names of functions and methods that leave their arguments as they are; their results may be unknown."""
_GETENV: Final = ("os.environ.get", "os.getenv", "environ.get", "getenv", "os.environ.setdefault")


class Calls(Expressions):
    """The results of calls. A call that is not understood makes its arguments unknown."""

    def call(self, node: ast.Call) -> Any:
        name = source(node.func)
        arguments = self.positional(node.args)
        named: dict[Any, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                named = self.spread(self.value(keyword.value)) | named
            else:
                named[keyword.arg] = self.value(keyword.value)
        if name in _GETENV:
            return self._environment(name, arguments, named)
        function = self.value(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else Unknown("")
        if isinstance(function, Function):
            return self._called(function, arguments, named)
        value = self._known_call(node, name, function, arguments, named)
        if value is NotImplemented and name.rpartition(".")[2] not in (*PURE, *FUNCTIONS, *METHODS):
            for part in (*arguments, *named.values()):
                self.state.disturb(part, source(node))
            if isinstance(node.func, ast.Attribute):
                self.state.disturb(self.value(node.func.value), source(node))
        return self.made(value) if isinstance(value, dict) else value

    def _environment(self, name: str, arguments: list[Any], named: Mapping[Any, Any]) -> Any:
        default = arguments[1] if len(arguments) > 1 else named.get("default")
        if not arguments or not isinstance(arguments[0], str) or any(isinstance(one, Several) for one in arguments):
            return NotImplemented
        if name.endswith("setdefault") and arguments[0] not in self.environ:
            self.state.write(self.environ, arguments[0], default)
        return METHODS["get"](self.environ, arguments[0], default)

    def _known_call(self, node: ast.Call, name: str, function: Any, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """A function of Python, a class of settings, or a method."""
        match name, arguments:
            case "setattr" | "delattr", [owner, field, *value] if len(value) < 2:
                known = name == "setattr" and value
                self.set_field(owner, field, value[0] if known else Unknown(source(node)))
                return None
            case "setattr" | "delattr", _:
                return NotImplemented
            case "dict", [] | [dict(), *_]:
                return with_keys(arguments[0] if arguments else {}, named)
            case "copy.copy" | "copy.deepcopy" | "deepcopy", [value]:
                return self._copied(value, name)
        if name in FUNCTIONS:
            return NotImplemented if named else _applied(FUNCTIONS[name], arguments)
        last = (function.name if isinstance(function, Named) else name).rpartition(".")[2]
        if last[:1].isupper() and last.replace("_", "").isalnum():
            return self._of_class(last, arguments, named)
        if isinstance(node.func, ast.Attribute):
            return self._method(self.value(node.func.value), node.func.attr, arguments, named)
        return NotImplemented

    def _of_class(self, name: str, arguments: list[Any], named: dict[Any, Any]) -> Made:
        """Settings of a class. The defaults of a class of the file are unknown."""
        defaults = {REST: Unknown(f"class {name}")} if name in self.classes else {}
        places = {f"argument {place}": value for place, value in enumerate(arguments, 1)}
        return Made(name, self.state.new(defaults | places | named))

    def _copied(self, value: Any, name: str) -> Any:
        if name == "copy.copy":
            if isinstance(value, Made):
                return Made(value.group, self.state.new(dict(value.fields)))
            return self.made(value.copy()) if isinstance(value, dict | list) else value
        if not isinstance(value, Made | dict | list | tuple):
            return value
        made = copy.deepcopy(value, {})
        self._all_new(made, set())
        return made

    def _all_new(self, value: Any, seen: set[int]) -> None:
        value = value.fields if isinstance(value, Made) else value
        if id(value) in seen or not isinstance(value, dict | list | tuple):
            return
        seen.add(id(value))
        self.made(value)
        for item in value.values() if isinstance(value, dict) else value:
            self._all_new(item, seen)

    def _method(self, owner: Any, name: str, arguments: list[Any], named: dict[Any, Any]) -> Any:
        if isinstance(owner, Made) and name in ("model_copy", "copy") and not arguments and named.keys() <= {
            "update", "deep",
        }:  # fmt: skip
            update = named.get("update")
            made = self._copied(owner, "copy.deepcopy" if named.get("deep") is True else "copy.copy")
            made.fields = self.state.new(with_keys(made.fields, {} if update is None else self.spread(update)))
            return made
        if isinstance(owner, list) and not named:
            return self.list_method(owner, name, arguments)
        if isinstance(owner, dict) and name in ("update", "setdefault", "pop", "clear", "copy"):
            return self.dict_method(owner, name, arguments, named)
        return _applied(METHODS[name], [owner, *arguments]) if name in METHODS and not named else NotImplemented

    def list_method(self, owner: list[Any], name: str, arguments: list[Any]) -> Any:
        """The result of a method of a list, which changes."""
        match name, arguments:
            case "append", [item]:
                new: Any = [*owner, item]
            case "extend", [list() | tuple() as items]:
                new = [*owner, *items]
            case "extend", [unknown]:
                new = [*owner, Several(unknown.text if isinstance(unknown, Unknown) else "extend")]
            case "insert", [int(place), item] if whole(owner):
                new = [*owner[:place], item, *owner[place:]]
            case "clear", []:
                new = []
            case "reverse", []:
                new = owner[::-1]
            case "copy", []:
                return self.state.new(owner.copy())
            case "pop", [] if owner and not isinstance(owner[-1], Several):
                last = owner[-1]
                self.state.rewrite(owner, owner[:-1])
                return last
            case _:
                return NotImplemented
        if len(new) > MOST_NODES:
            raise TooMuch("too long a list")
        self.state.rewrite(owner, new)
        return None

    def dict_method(self, owner: Scope, name: str, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """The result of a method of a dictionary, which changes."""
        match name, arguments:
            case "update", [] | [_]:
                given = with_keys(self.spread(arguments[0]) if arguments else {}, named)
                if REST in given:
                    self._clear(owner)
                for key, value in given.items():
                    self.state.write(owner, key, value)
                return None
            case "setdefault", [str() | int() as key, default] if key in owner or whole(owner):
                if key not in owner:
                    self.state.write(owner, key, default)
                return owner[key]
            case "pop", [str() | int() as key, *default] if key in owner or (default and whole(owner)):
                value = owner[key] if key in owner else default[0]
                self.state.remove(owner, key)
                return value
            case "clear", []:
                self._clear(owner)
                return None
            case "copy", []:
                return self.state.new(owner.copy())
        return NotImplemented

    def _clear(self, owner: Scope) -> None:
        for key in list(owner):
            self.state.remove(owner, key)

    def _called(self, function: Function, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """The result of a function of the file."""
        scope = _bound(function, arguments, named)
        if scope is None or len(self.frames) > MOST_CALLS:
            self.disturbed(ast.Module(function.node.body, []))
            return NotImplemented
        frame = Frame((*function.scopes, self.state.new(scope)))
        self.frames.append(frame)
        self.state.begin()
        value: Any = None
        try:
            self.run(function.node.body)
        except Returned as returned:
            value = returned.value
        finally:
            self.frames.pop()
            changes = self.state.end()
            if frame.returned:
                self.state.blur(changes, f"{function.name}(...)")
        return either([*frame.returned, value])


def _bound(function: Function, arguments: list[Any], named: dict[Any, Any]) -> Scope | None:
    """The names of a call, or None if it is not a valid one."""
    given = function.node.args
    places = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names = dict.fromkeys([*places, *(argument.arg for argument in given.kwonlyargs)])
    first = list(takewhile(lambda argument: not isinstance(argument, Several), arguments))
    has_several = len(first) < len(arguments)
    scope: Scope = {name: Unknown(name) for name in names}
    if not has_several and REST not in named:
        scope |= function.defaults
    scope |= dict(zip(places, first, strict=False))
    extra = {name: value for name, value in named.items() if name not in names}
    if given.vararg is not None:
        scope[given.vararg.arg] = tuple(arguments[len(places) :])
    elif len(arguments) > len(places) and not has_several:
        return None
    if given.kwarg is not None:
        scope[given.kwarg.arg] = extra
    elif extra.keys() - {REST}:
        return None
    return scope | {name: value for name, value in named.items() if name not in extra}


def _applied(function: Callable[..., Any], arguments: list[Any]) -> Any:
    if any(isinstance(argument, Several) for argument in arguments):
        return NotImplemented
    try:
        return function(*arguments)
    except (TypeError, LookupError):  # too few or too many arguments
        return NotImplemented
