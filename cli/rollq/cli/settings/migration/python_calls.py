"""Evaluates the calls in a Python settings file: the file's functions, settings classes, and methods."""

import ast
import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile
from typing import Any, Final

from rollq.cli.settings.migration.expressions import FUNCTIONS, METHODS, whole, with_keys
from rollq.cli.settings.migration.python_state import Returned, Scope, either
from rollq.cli.settings.migration.python_values import MOST_NODES, Expressions, Frame, TooMuch, source
from rollq.cli.settings.migration.values import REST, Function, Made, Named, Several, Unknown, containers

MOST_CALLS: Final = 10
PURE: Final = frozenset(
    {
        "print", "isinstance", "issubclass", "hasattr", "getattr", "type", "repr", "sorted", "sum", "any", "all",
        "open", "round", "abs", "vars", "id", "format", "callable", "set", "frozenset", "map", "filter", "reversed",
        "next", "iter", "hash", "partial", "model_dump", "model_dump_json", "build", "info", "warning", "debug",
        "error", "dumps", "dump", "count", "index", "exists", "mkdir", "makedirs", "is_available",
    }
)  # fmt: skip
"""Names of functions and methods that leave their arguments unchanged; their results may be unknown."""
_GETENV: Final = ("os.environ.get", "os.getenv", "environ.get", "getenv", "os.environ.setdefault")


class Calls(Expressions):
    """Computes the results of calls. An unsupported call makes its arguments unknown."""

    def call(self, node: ast.Call) -> Any:
        name = source(node.func)
        arguments, named = self.positional(node.args), self._named(node.keywords)
        if name in _GETENV:
            return self._environment(name, arguments, named)
        function = self.value(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else Unknown("")
        if isinstance(function, Function):
            return self._called(function, arguments, named)
        value = self._known_call(node, name, function, arguments, named)
        if value is NotImplemented and name.rpartition(".")[2] not in (*PURE, *FUNCTIONS, *METHODS):
            self._disturb_objects(node, (*arguments, *named.values()))
        return self.made(value) if isinstance(value, dict) else value

    def _disturb_objects(self, node: ast.Call, arguments: Iterable[Any]) -> None:
        """Make all that a call could change unknown: its arguments, and its method's owner."""
        owner = [self.value(node.func.value)] if isinstance(node.func, ast.Attribute) else []
        for part in (*arguments, *owner):
            self.state.disturb(part, source(node))

    def _named(self, keywords: list[ast.keyword]) -> dict[Any, Any]:
        named: dict[Any, Any] = {}
        for keyword in keywords:
            if keyword.arg is None:
                named = self.spread(self.value(keyword.value)) | named
            else:
                named[keyword.arg] = self.value(keyword.value)
        return named

    def _environment(self, name: str, arguments: list[Any], named: Mapping[Any, Any]) -> Any:
        default = arguments[1] if len(arguments) > 1 else named.get("default")
        if not arguments or not isinstance(arguments[0], str) or not whole(arguments):
            return NotImplemented
        if name.endswith("setdefault") and arguments[0] not in self.environ:
            self.state.write(self.environ, arguments[0], default)
        return METHODS["get"](self.environ, arguments[0], default)

    def _known_call(self, node: ast.Call, name: str, function: Any, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """The result of a Python function, a settings class, or a method."""
        value = self._built_in(node, name, arguments, named)
        if value is not NotImplemented:
            return value
        if name in FUNCTIONS:
            return _applied(FUNCTIONS[name], arguments, named)
        last = (function.name if isinstance(function, Named) else name).rpartition(".")[2]
        if last[:1].isupper() and last.replace("_", "").isalnum():
            return self._of_class(last, arguments, named)
        if isinstance(node.func, ast.Attribute):
            return self._method(self.value(node.func.value), node.func.attr, arguments, named)
        return NotImplemented

    def _built_in(self, node: ast.Call, name: str, arguments: list[Any], named: dict[Any, Any]) -> Any:
        match name, arguments:
            case "setattr" | "delattr", [owner, field, *value] if len(value) < 2:
                known = name == "setattr" and value
                self.set_field(owner, field, value[0] if known else Unknown(source(node)))
                return None
            case "dict", [] | [dict(), *_]:
                return with_keys(dict(*arguments[:1]), named)
            case "copy.copy" | "copy.deepcopy" | "deepcopy", [value]:
                return self._copied(value, name)
        return NotImplemented

    def _of_class(self, name: str, arguments: list[Any], named: dict[Any, Any]) -> Made:
        """A class's settings. The defaults of a class that the file defines are unknown."""
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
        for part in containers(made):
            self.made(part)
        return made

    def _method(self, owner: Any, name: str, arguments: list[Any], named: dict[Any, Any]) -> Any:
        match owner:
            case Made():
                return self._changed_copy(owner, name, arguments, named)
            case list() if not named:
                return self.list_method(owner, name, arguments)
            case dict() if name in ("update", "setdefault", "pop", "clear", "copy"):
                return self.dict_method(owner, name, arguments, named)
        return _applied(METHODS[name], [owner, *arguments], named) if name in METHODS else NotImplemented

    def _changed_copy(self, owner: Made, name: str, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """A copy of settings, as pydantic makes it."""
        if name not in ("model_copy", "copy") or arguments or named.keys() - {"update", "deep"}:
            return NotImplemented
        update = named.get("update")
        made = self._copied(owner, "copy.deepcopy" if named.get("deep") is True else "copy.copy")
        made.fields = self.state.new(with_keys(made.fields, {} if update is None else self.spread(update)))
        return made

    def list_method(self, owner: list[Any], name: str, arguments: list[Any]) -> Any:
        """The result of a list method that changes the list."""
        match name, arguments:
            case "copy", []:
                return self.state.new(owner.copy())
            case "pop", [] if owner and not isinstance(owner[-1], Several):
                last = owner[-1]
                self.state.rewrite(owner, owner[:-1])
                return last
        new = _changed(owner, name, arguments)
        if new is None:
            return NotImplemented
        if len(new) > MOST_NODES:
            raise TooMuch("too long a list")
        self.state.rewrite(owner, new)
        return None

    def dict_method(self, owner: Scope, name: str, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """The result of a dictionary method that changes the dictionary."""
        match name, arguments:
            case "update", [] | [_]:
                self._update(owner, with_keys(self.spread(arguments[0]) if arguments else {}, named))
                return None
            case "setdefault", [str() | int() as key, default]:
                return self._set_default(owner, key, default)
            case "pop", [str() | int() as key, *default]:
                return self._pop(owner, key, *default)
            case "clear", []:
                self.state.clear(owner)
                return None
            case "copy", []:
                return self.state.new(owner.copy())
        return NotImplemented

    def _update(self, owner: Scope, given: Scope) -> None:
        if REST in given:
            self.state.clear(owner)
        for key, value in given.items():
            self.state.write(owner, key, value)

    def _set_default(self, owner: Scope, key: Any, default: Any) -> Any:
        if key not in owner and not whole(owner):
            return NotImplemented
        if key not in owner:
            self.state.write(owner, key, default)
        return owner[key]

    def _pop(self, owner: Scope, key: Any, *default: Any) -> Any:
        if key not in owner and not (default and whole(owner)):
            return NotImplemented
        value = owner[key] if key in owner else default[0]
        self.state.remove(owner, key)
        return value

    def _called(self, function: Function, arguments: list[Any], named: dict[Any, Any]) -> Any:
        """The result of a function that the file defines."""
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


def _changed(items: list[Any], name: str, arguments: list[Any]) -> list[Any] | None:
    """The list after one of its methods; None for another method or other arguments."""
    match name, arguments:
        case "append", [item]:
            return [*items, item]
        case "extend", [added]:
            return [*items, *_added(added)]
        case "insert", [int(place), item] if whole(items):
            return [*items[:place], item, *items[place:]]
        case "clear", []:
            return []
        case "reverse", []:
            return items[::-1]
    return None


def _added(items: Any) -> Iterable[Any]:
    if isinstance(items, list | tuple):
        return items
    return [Several(items.text if isinstance(items, Unknown) else "extend")]


def _bound(function: Function, arguments: list[Any], named: dict[Any, Any]) -> Scope | None:
    """The names of a call's arguments, or None if the call is invalid."""
    given = function.node.args
    places = _names(*given.posonlyargs, *given.args)
    first = takewhile(lambda argument: not isinstance(argument, Several), arguments)
    scope: Scope = {name: Unknown(name) for name in (*places, *_names(*given.kwonlyargs))}
    extra = dict(named)
    known = {name: extra.pop(name) for name in scope if name in extra}
    if whole(arguments) and REST not in named:
        scope |= function.defaults
    stars = _starred(given, arguments[len(places) :], extra, has_several=not whole(arguments))
    return None if stars is None else scope | dict(zip(places, first, strict=False)) | stars | known


def _names(*arguments: ast.arg) -> list[str]:
    return [argument.arg for argument in arguments]


def _starred(given: ast.arguments, rest: list[Any], extra: Scope, *, has_several: bool) -> Scope | None:
    """The values of `*args` and `**kwargs`, or None if there are too many arguments without them."""
    stars: Scope = {}
    if given.vararg is not None:
        stars[given.vararg.arg] = tuple(rest)
    elif rest and not has_several:
        return None
    if given.kwarg is not None:
        stars[given.kwarg.arg] = extra
    elif extra.keys() - {REST}:
        return None
    return stars


def _applied(function: Callable[..., Any], arguments: list[Any], named: Mapping[Any, Any]) -> Any:
    if named or not whole(arguments):
        return NotImplemented
    try:
        return function(*arguments)
    except (TypeError, LookupError):  # too few or too many arguments
        return NotImplemented
