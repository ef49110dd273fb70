"""Reads what a Python file of settings assigns, without running it.

The syntax tree is evaluated as far as literals, names, functions of the file and a few of Python's own functions go.
Environment variables count as unset. All else is `Unknown`. Nothing is imported or called, and the work is bounded.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.migration.expressions import BINARY, COMPARISONS, FUNCTIONS, METHODS, UNARY, as_text, joined
from rollq.cli.settings.migration.values import Made, Named, Placeholder, Unknown

MOST_STATEMENTS: Final = 20_000
MOST_CALLS: Final = 20
LONGEST_LOOP: Final = 100

Scope = dict[str, Any]


class _Returned(Exception):
    """Ends a function of the file."""

    def __init__(self, value: Any) -> None:
        self.value = value


def assigned(path: Path, text: str) -> Scope:
    """Name -> value of everything that the file assigns at its top level. Raises `ConfigError` if it is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{path}: not Python{f', at line {line}' if line else ''}: {error}") from None
    reader = _Reader()
    try:
        reader.run(tree.body)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be read") from None
    except _Returned:
        raise ConfigError(f"{path}: not Python: 'return' outside of a function") from None
    return reader.scopes[0]


class _Reader:
    """The state of a file that is read: its names, and the names in functions that are being evaluated."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = [{}]
        self._statements = 0

    def run(self, body: list[ast.stmt]) -> None:
        """Evaluate statements in the innermost scope."""
        for statement in body:
            self._statements += 1
            if self._statements > MOST_STATEMENTS:
                raise ConfigError(
                    f"the file takes more than {MOST_STATEMENTS:,} statements: write its values as literals"
                )
            run = _STATEMENTS.get(type(statement))
            if run is not None:
                run(self, statement)

    def assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self.scopes[-1][target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            if isinstance(owner, Made):
                owner.fields[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner, key = self.value(target.value), self.value(target.slice)
            if isinstance(owner, dict) and isinstance(key, str | int):
                owner[key] = value
        elif isinstance(target, ast.Tuple | ast.List):
            known = isinstance(value, list | tuple) and len(value) == len(target.elts)
            for place, part in enumerate(target.elts):
                self.assign(part, value[place] if known else Unknown(ast.unparse(target)))

    def for_(self, node: ast.For) -> None:
        items = _items(self.value(node.iter))
        for item in [Unknown(ast.unparse(node.target))] if items is None else items:
            self.assign(node.target, item)
            self.run(node.body)

    def if_(self, node: ast.If) -> None:
        test = self.value(node.test)
        if _is_known(test):
            self.run(node.body if test else node.orelse)
            return
        self.run(node.orelse)
        self.run(node.body)

    def with_(self, node: ast.With) -> None:
        for item in node.items:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Unknown(ast.unparse(item.context_expr)))
        self.run(node.body)

    def define(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.scopes[-1][node.name] = node if isinstance(node, ast.FunctionDef) else Named(node.name)

    def import_(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            self.scopes[-1][name] = Named(name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}")

    def return_(self, node: ast.Return) -> None:
        raise _Returned(None if node.value is None else self.value(node.value))

    def expression(self, node: ast.Expr) -> None:
        """Of statements that are expressions, only `list.append` and `list.extend` matter."""
        call = node.value
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and len(call.args) == 1):
            return
        owner = self.value(call.func.value)
        if isinstance(owner, list) and len(owner) < LONGEST_LOOP:
            value = self.value(call.args[0])
            if call.func.attr == "append":
                owner.append(value)
            elif call.func.attr == "extend":
                owner.extend(value if isinstance(value, list | tuple) else [value])

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or `Unknown`."""
        evaluate = _EXPRESSIONS.get(type(node))
        value = evaluate(self, node) if evaluate else None
        return Unknown(ast.unparse(node)) if evaluate is None or value is NotImplemented else value

    def name(self, node: ast.Name) -> Any:
        for scope in reversed(self.scopes):
            if node.id in scope:
                found = scope[node.id]
                return Named(found.name) if isinstance(found, ast.FunctionDef) else found
        return Unknown(node.id)

    def text(self, node: ast.JoinedStr) -> Any:
        parts = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                if part.format_spec is not None or part.conversion != -1:
                    return NotImplemented
                parts.append(as_text(self.value(part.value)))
            else:
                parts.append(self.value(part))
        return joined("", parts)

    def attribute(self, node: ast.Attribute) -> Any:
        owner = self.value(node.value)
        if isinstance(owner, Made):
            return owner.fields.get(node.attr, NotImplemented)
        return Named(f"{owner.name}.{node.attr}") if isinstance(owner, Named) else NotImplemented

    def subscript(self, node: ast.Subscript) -> Any:
        key = self.value(node.slice)
        if ast.unparse(node.value) in ("os.environ", "environ"):
            return Placeholder(key) if isinstance(key, str) else NotImplemented
        owner = self.value(node.value)
        try:
            return owner[key] if isinstance(owner, list | tuple | dict | str) and _is_known(key) else NotImplemented
        except (LookupError, TypeError):
            return NotImplemented

    def binary(self, node: ast.BinOp) -> Any:
        left, right, compute = self.value(node.left), self.value(node.right), BINARY.get(type(node.op))
        return compute(left, right) if compute else NotImplemented

    def unary(self, node: ast.UnaryOp) -> Any:
        value, compute = self.value(node.operand), UNARY.get(type(node.op))
        try:
            return compute(value) if compute and _is_known(value) else NotImplemented
        except TypeError:
            return NotImplemented

    def boolean(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for part in node.values:
            value = self.value(part)
            if not _is_known(value):
                return NotImplemented
            if bool(value) is isinstance(node.op, ast.Or):
                return value
        return value

    def comparison(self, node: ast.Compare) -> Any:
        compare = COMPARISONS.get(type(node.ops[0])) if len(node.ops) == 1 else None
        left, right = self.value(node.left), self.value(node.comparators[0])
        try:
            return compare(left, right) if compare and _is_known(left) and _is_known(right) else NotImplemented
        except TypeError:
            return NotImplemented

    def choice(self, node: ast.IfExp) -> Any:
        test = self.value(node.test)
        return self.value(node.body if test else node.orelse) if _is_known(test) else NotImplemented

    def dictionary(self, node: ast.Dict) -> Any:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            at = self.value(key) if key is not None else None
            if isinstance(at, str | int):
                made[at] = self.value(value)
            elif key is None and isinstance(inner := self.value(value), dict):
                made |= inner
        return made

    def sequence(self, node: ast.List | ast.Tuple) -> Any:
        made = [self.value(part) for part in node.elts if not isinstance(part, ast.Starred)]
        return made if isinstance(node, ast.List) else tuple(made)

    def call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv"):
            return self.value(node.args[1]) if len(node.args) > 1 else None
        arguments = [self.value(part) for part in node.args if not isinstance(part, ast.Starred)]
        named = {part.arg: self.value(part.value) for part in node.keywords if part.arg is not None}
        if (function := self._function(name)) is not None:
            return self._called(function, arguments, named)
        if name in FUNCTIONS:
            return _applied(FUNCTIONS[name], arguments, named if name == "dict" else {})
        last = name.rpartition(".")[2]
        if last[:1].isupper() and last.replace("_", "").isalnum():
            return Made(last, named | {f"argument {place}": value for place, value in enumerate(arguments, 1)})
        if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not named:
            return _applied(METHODS[node.func.attr], [self.value(node.func.value), *arguments], {})
        return NotImplemented

    def _function(self, name: str) -> ast.FunctionDef | None:
        found = next((scope[name] for scope in reversed(self.scopes) if name in scope), None)
        return found if isinstance(found, ast.FunctionDef) else None

    def _called(self, function: ast.FunctionDef, arguments: list[Any], named: Mapping[str, Any]) -> Any:
        """The result of a function of the file."""
        if len(self.scopes) > MOST_CALLS or any(
            isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)
        ):
            return NotImplemented
        names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
        defaults = function.args.defaults
        scope: Scope = {name: Unknown(name) for name in names}
        places = [argument.arg for argument in function.args.args]
        scope |= {
            name: self.value(node) for name, node in zip(places[len(places) - len(defaults) :], defaults, strict=True)
        }
        scope |= dict(zip(names, arguments, strict=False)) | dict(named)
        self.scopes.append(scope)
        try:
            self.run(function.body)
        except _Returned as returned:
            return returned.value
        finally:
            self.scopes.pop()
        return None


def _applied(function: Callable[..., Any], arguments: list[Any], named: Mapping[str, Any]) -> Any:
    try:
        return function(*arguments, **named)
    except (TypeError, LookupError):  # too few or too many arguments
        return NotImplemented


def _is_known(value: Any) -> bool:
    return not isinstance(value, Unknown | Placeholder | Named)


def _items(value: Any) -> list[Any] | None:
    """The items of a loop over a value, or None if that is unknown or too long."""
    items = list(value) if isinstance(value, list | tuple | dict) else None
    return items if items is not None and len(items) <= LONGEST_LOOP else None


def _parts(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.AugAssign):
        yield node.target, ast.BinOp(node.target, node.op, node.value)


def _assign(reader: _Reader, node: Any) -> None:
    for target, value in _parts(node):
        reader.assign(target, reader.value(value))


_STATEMENTS: Final[Mapping[type[ast.stmt], Callable[[_Reader, Any], None]]] = {
    ast.Assign: _assign,
    ast.AnnAssign: _assign,
    ast.AugAssign: _assign,
    ast.For: _Reader.for_,
    ast.If: _Reader.if_,
    ast.With: _Reader.with_,
    ast.Try: lambda reader, node: reader.run(node.body),
    ast.FunctionDef: _Reader.define,
    ast.ClassDef: _Reader.define,
    ast.Import: _Reader.import_,
    ast.ImportFrom: _Reader.import_,
    ast.Return: _Reader.return_,
    ast.Expr: _Reader.expression,
}
_EXPRESSIONS: Final[Mapping[type[ast.expr], Callable[[_Reader, Any], Any]]] = {
    ast.Constant: lambda reader, node: node.value,
    ast.Name: _Reader.name,
    ast.JoinedStr: _Reader.text,
    ast.Attribute: _Reader.attribute,
    ast.Subscript: _Reader.subscript,
    ast.BinOp: _Reader.binary,
    ast.UnaryOp: _Reader.unary,
    ast.BoolOp: _Reader.boolean,
    ast.Compare: _Reader.comparison,
    ast.IfExp: _Reader.choice,
    ast.Dict: _Reader.dictionary,
    ast.List: _Reader.sequence,
    ast.Tuple: _Reader.sequence,
    ast.Call: _Reader.call,
}
