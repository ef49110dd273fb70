"""Evaluates the expressions in a Python settings file, without running the file."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from rollq.cli.settings.migration.expressions import (
    BINARY,
    COMPARISONS,
    LARGEST,
    METHODS,
    UNARY,
    as_text,
    joined,
    truth,
    whole,
    with_keys,
)  # fmt: skip
from rollq.cli.settings.migration.python_state import Scope, State, either
from rollq.cli.settings.migration.values import REST, Made, Named, Placeholder, Several, Unknown, is_known, shown

MOST_NODES: Final = 300_000
LONGEST_LOOP: Final = 100


class TooMuch(Exception):
    """Reading the file takes too much work."""


@dataclass(slots=True)
class Frame:
    """The file itself, or a call of one of its functions."""

    scopes: tuple[Scope, ...]
    """From the module to the innermost."""
    declared: dict[str, Scope] = field(default_factory=dict)
    """Names that `global` and `nonlocal` give to another scope."""
    returned: list[Any] = field(default_factory=list)
    """Values that the call may have returned before its end."""
    loops: list[bool] = field(default_factory=list)
    """For each loop around the statement, whether it may have been left early."""


def source(node: ast.AST) -> str:
    """An expression as it is written."""
    try:
        return ast.unparse(node)
    except ValueError:
        return "a very long number"


class Expressions:
    """Computes the values of expressions. An unsupported expression is `Unknown`, and so is all that it could
    change."""

    def __init__(self) -> None:
        self.state = State()
        self.frames = [Frame(({},))]
        self.environ: Scope = {}
        self.classes: set[str] = set()
        self._nodes = 0

    @property
    def frame(self) -> Frame:
        """The innermost call."""
        return self.frames[-1]

    def run(self, body: list[ast.stmt]) -> None:
        """Evaluate statements."""
        raise NotImplementedError

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or `Unknown`."""
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise TooMuch(f"more than {MOST_NODES:,} expressions")
        evaluate = _EXPRESSIONS.get(type(node))
        if evaluate is None:
            self.disturbed(node)
            return Unknown(source(node))
        value = evaluate(self, node)
        return Unknown(source(node)) if value is NotImplemented else value

    def assign(self, target: ast.expr, value: Any) -> None:
        """Set the target of an assignment."""
        if isinstance(target, ast.Name):
            self.state.write(self.frame.declared.get(target.id, self.frame.scopes[-1]), target.id, value)
        elif isinstance(target, ast.Attribute):
            self.set_field(self.value(target.value), target.attr, value)
        elif isinstance(target, ast.Subscript):
            self._set_item(target, value)
        elif isinstance(target, ast.Tuple | ast.List):
            self._unpack(target, value)
        elif isinstance(target, ast.Starred):
            self.assign(target.value, value)

    def _unpack(self, target: ast.Tuple | ast.List, value: Any) -> None:
        is_starred = any(isinstance(part, ast.Starred) for part in target.elts)
        known = isinstance(value, list | tuple) and whole(value) and len(value) == len(target.elts)
        for place, part in enumerate(target.elts):
            self.assign(part, value[place] if known and not is_starred else Unknown(source(target)))

    def set_field(self, owner: Any, name: Any, value: Any) -> None:
        """Set a field of an object. The name None means an unknown field."""
        if isinstance(owner, Made) and isinstance(name, str):
            self.state.write(owner.fields, name, value)
        else:
            self.state.disturb(owner, f"set {shown(name)}")

    def _set_item(self, target: ast.Subscript, value: Any) -> None:
        owner, key = self._owner(target.value), self.value(target.slice)
        if isinstance(owner, dict) and isinstance(key, str | int | float):
            self.state.write(owner, key, value)
        elif isinstance(owner, list) and whole(owner) and isinstance(key, int) and -len(owner) <= key < len(owner):
            place = key % len(owner)
            self.state.rewrite(owner, [*owner[:place], value, *owner[place + 1 :]])
        else:
            self.state.disturb(owner, source(target))

    def _owner(self, node: ast.expr) -> Any:
        return self.environ if source(node) in ("os.environ", "environ") else self.value(node)

    def disturbed(self, tree: ast.AST) -> None:
        """Make all that an unsupported part of the file could set unknown."""
        text = source(tree)
        for node in ast.walk(tree):
            self._nodes += 1
            match node:
                case ast.Name(ctx=ast.Store() | ast.Del()) | ast.NamedExpr():
                    self.assign(node.target if isinstance(node, ast.NamedExpr) else node, Unknown(text))
                case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                    self._disturb_root(node.value, text)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    self.assign(ast.Name(name, ast.Store()), Unknown(text))
                case ast.Call():
                    self._disturb_call(node, text)

    def _disturb_call(self, node: ast.Call, text: str) -> None:
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self._disturb_root(part, text)
        if isinstance(node.func, ast.Attribute):
            self._disturb_root(node.func.value, text)

    def _disturb_root(self, node: ast.expr, text: str) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        if isinstance(node, ast.Name):
            self.state.disturb(self.name(node), text)

    def made(self, value: Any) -> Any:
        """A value that was made just now."""
        if isinstance(value, dict):
            return self.state.new(value)
        return self.state.new(value) if isinstance(value, list) else value

    def name(self, node: ast.Name) -> Any:
        for scope in reversed(self.frame.scopes):
            if node.id in scope:
                return scope[node.id]
        return Unknown(node.id)

    def constant(self, node: ast.Constant) -> Any:
        is_long = isinstance(node.value, int) and abs(node.value) >= LARGEST
        return NotImplemented if is_long or node.value is Ellipsis else node.value

    def walrus(self, node: ast.NamedExpr) -> Any:
        value = self.value(node.value)
        self.assign(node.target, value)
        return value

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
        key, owner = self.value(node.slice), self._owner(node.value)
        if owner is self.environ:
            return self._variable(key)
        if not isinstance(owner, dict | str) and not (isinstance(owner, list | tuple) and whole(owner)):
            return NotImplemented
        try:
            return owner[key] if is_known(key) else NotImplemented
        except (LookupError, TypeError):
            return NotImplemented

    def _variable(self, name: Any) -> Any:
        """An environment variable, which must be set."""
        found = METHODS["get"](self.environ, name)
        return Placeholder(name) if found is None and isinstance(name, str) else found

    def binary(self, node: ast.BinOp) -> Any:
        left, right, compute = self.value(node.left), self.value(node.right), BINARY.get(type(node.op))
        value = compute(left, right) if compute else NotImplemented
        return self.made(value)

    def unary(self, node: ast.UnaryOp) -> Any:
        value, compute = self.value(node.operand), UNARY.get(type(node.op))
        if isinstance(node.op, ast.Not):
            is_true = truth(value)
            return NotImplemented if is_true is None else not is_true
        return compute(value) if compute and isinstance(value, int | float) else NotImplemented

    def boolean(self, node: ast.BoolOp) -> Any:
        value: Any = None
        for part in node.values:
            value = self.value(part)
            is_true = truth(value)
            if is_true is None and part is not node.values[-1]:
                return NotImplemented
            if is_true is isinstance(node.op, ast.Or):
                return value
        return value

    def comparison(self, node: ast.Compare) -> Any:
        left = self.value(node.left)
        for operation, part in zip(node.ops, node.comparators, strict=True):
            right, compare = self.value(part), COMPARISONS.get(type(operation))
            result = compare(left, right) if compare else NotImplemented
            if result is not True:
                return result
            left = right
        return True

    def choice(self, node: ast.IfExp) -> Any:
        is_true = truth(self.value(node.test))
        if is_true is None:
            return either([self.value(node.body), self.value(node.orelse)])
        return self.value(node.body if is_true else node.orelse)

    def dictionary(self, node: ast.Dict) -> Any:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            item = self.value(value)
            if key is None:
                made = with_keys(made, self.spread(item))
                continue
            at = self.value(key)
            if isinstance(at, str | int | float | None):
                made[at] = item
            else:
                made = {REST: Unknown(source(key))}
        return self.state.new(made)

    def spread(self, value: Any) -> dict[Any, Any]:
        """The keys that `**value` gives."""
        if isinstance(value, dict):
            return value
        return {REST: value if isinstance(value, Unknown) else Unknown("**...")}

    def sequence(self, node: ast.List | ast.Tuple) -> Any:
        made = self.positional(node.elts)
        return self.state.new(made) if isinstance(node, ast.List) else tuple(made)

    def positional(self, nodes: list[ast.expr]) -> list[Any]:
        """Items and arguments, with starred items expanded."""
        made: list[Any] = []
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node)
            if not isinstance(node, ast.Starred):
                made.append(value)
            elif isinstance(value, list | tuple):
                made += value
            else:
                made.append(Several(source(node)))
        return made

    def comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> Any:
        made: list[Any] = []
        self._within(node.generators, lambda: made.append(self.value(node.elt)), made)
        return self.state.new(made)

    def dict_comprehension(self, node: ast.DictComp) -> Any:
        pairs: list[Any] = []
        self._within(node.generators, lambda: pairs.append((self.value(node.key), self.value(node.value))), pairs)
        is_known_dict = all(isinstance(pair, tuple) and isinstance(pair[0], str | int) for pair in pairs)
        return self.state.new(dict(pairs) if is_known_dict else {REST: Unknown(source(node))})

    def _within(self, generators: list[ast.comprehension], add: Callable[[], None], made: list[Any]) -> None:
        """Call `add` for each round of a comprehension, which has a separate scope."""
        frame = self.frame
        self.frames.append(Frame((*frame.scopes, {}), frame.declared))
        try:
            self._rounds(generators, add, made)
        finally:
            self.frames.pop()

    def _rounds(self, generators: list[ast.comprehension], add: Callable[[], None], made: list[Any]) -> None:
        if not generators:
            add()
            return
        first, *others = generators
        items = self.items(self.value(first.iter))
        for item in [Unknown(source(first.target))] if items is None else items:
            before = len(made)
            self.assign(first.target, item)
            tests = [truth(self.value(test)) for test in first.ifs]
            if False in tests:
                continue
            self._rounds(others, add, made)
            if items is None or None in tests:
                made[before:] = [Several.of(source(first.iter), made[before:])]

    def items(self, value: Any) -> list[Any] | None:
        """The items of a loop over a value, or None for an unknown or too long value."""
        is_listed = isinstance(value, list | tuple | dict) and whole(value)
        return list(value) if is_listed and len(value) <= LONGEST_LOOP else None

    def call(self, node: ast.Call) -> Any:
        """The result of a call."""
        raise NotImplementedError


def parts(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of an assignment, each with its value."""
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value


_EXPRESSIONS: Final[Mapping[type[ast.expr], Callable[[Expressions, Any], Any]]] = {
    ast.Constant: Expressions.constant,
    ast.Name: Expressions.name,
    ast.NamedExpr: Expressions.walrus,
    ast.JoinedStr: Expressions.text,
    ast.Attribute: Expressions.attribute,
    ast.Subscript: Expressions.subscript,
    ast.BinOp: Expressions.binary,
    ast.UnaryOp: Expressions.unary,
    ast.BoolOp: Expressions.boolean,
    ast.Compare: Expressions.comparison,
    ast.IfExp: Expressions.choice,
    ast.Dict: Expressions.dictionary,
    ast.DictComp: Expressions.dict_comprehension,
    ast.List: Expressions.sequence,
    ast.Tuple: Expressions.sequence,
    ast.ListComp: Expressions.comprehension,
    ast.GeneratorExp: Expressions.comprehension,
    ast.Call: lambda reader, node: reader.call(node),
}
