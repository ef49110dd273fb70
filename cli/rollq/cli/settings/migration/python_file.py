"""Reads the assignments in a Python settings file, without running the file.

Only literals, names, the file's functions and a few built-in Python functions are evaluated in the syntax tree.
Environment variables count as unset. All other code is `Unknown`, and so is every name and object that such code could
set. Nothing is imported or called, and the work is bounded.
"""

import ast
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from rollq.buffer.errors import ConfigError
from rollq.cli.settings.migration.expressions import truth
from rollq.cli.settings.migration.python_calls import Calls
from rollq.cli.settings.migration.python_state import Ended, Left, Outcome, Raised, Returned, Scope, either
from rollq.cli.settings.migration.python_values import LONGEST_LOOP, TooMuch, parts, source
from rollq.cli.settings.migration.values import Function, Named, Unknown

MOST_STATEMENTS: Final = 10_000


def assigned(path: Path, text: str) -> Scope:
    """Name -> value, for all names that the file assigns at its top level. Raises `ConfigError` if the file is not
    Python."""
    try:
        tree = ast.parse(text.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(f"{path}: not Python{f', at line {line}' if line else ''}: {error}") from None
    reader = _Reader()
    try:
        reader.run(tree.body)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be read") from None
    except TooMuch as error:
        raise ConfigError(f"{path}: takes {error} to read: write its values as literals") from None
    except Returned:
        raise ConfigError(f"{path}: not Python: 'return' outside of a function") from None
    except Ended:  # the file itself raises an error: only earlier assignments count
        pass
    return reader.frame.scopes[0]


class _Reader(Calls):
    """Evaluates the statements of a file."""

    def __init__(self) -> None:
        super().__init__()
        self._statements = 0

    def run(self, body: list[ast.stmt]) -> None:
        """Evaluate statements in the innermost scope."""
        for statement in body:
            self._statements += 1
            if self._statements > MOST_STATEMENTS:
                raise TooMuch(f"more than {MOST_STATEMENTS:,} statements")
            run = _STATEMENTS.get(type(statement))
            if run is None:
                self.disturbed(statement)
            else:
                run(self, statement)

    def assign_(self, node: ast.Assign | ast.AnnAssign) -> None:
        found = list(parts(node))
        value = self.value(found[0][1]) if found else None
        for target, _ in found:
            self.assign(target, value)

    def augmented(self, node: ast.AugAssign) -> None:
        """Make an augmented assignment. Lists and dictionaries change in place, for all their names."""
        owner, other = self.value(node.target), self.value(node.value)
        if isinstance(owner, list) and isinstance(node.op, ast.Add):
            self.list_method(owner, "extend", [other])
        elif isinstance(owner, dict) and isinstance(node.op, ast.BitOr):
            self.dict_method(owner, "update", [other], {})
        else:
            self.assign(node.target, self.value(ast.BinOp(node.target, node.op, node.value)))

    def for_(self, node: ast.For) -> None:
        items = self.items(self.value(node.iter))
        if items is None:
            unknown = Unknown(source(node.target))
            self._unclear_loop(lambda: self.assign(node.target, unknown), node)
            return

        def rounds() -> None:
            for item in items:
                self.assign(node.target, item)
                if self._is_left(node.body):
                    return
            self.run(node.orelse)

        self._loop(rounds, node)

    def while_(self, node: ast.While) -> None:
        exact = True

        def rounds() -> None:
            nonlocal exact
            for _ in range(LONGEST_LOOP):
                test = truth(self.value(node.test))
                if test is False:
                    self.run(node.orelse)
                    return
                if test is None:
                    break
                if self._is_left(node.body):
                    return
            exact = False

        self._loop(rounds, node)
        if not exact:
            self._unclear_loop(lambda: None, node)

    def _is_left(self, body: list[ast.stmt]) -> bool:
        """Run a round of a loop. Returns whether it ends the loop."""
        try:
            self.run(body)
        except Left as left:
            return left.is_break
        return False

    def _loop(self, rounds: Callable[[], None], node: ast.For | ast.While) -> None:
        """Run the rounds of a loop. If the loop may have ended earlier, all that it changes is unknown."""
        frame = self.frame
        frame.loops.append(False)
        self.state.begin()
        try:
            rounds()
        finally:
            changes = self.state.end()
            if frame.loops.pop():
                self.state.blur(changes, _head(node))

    def _unclear_loop(self, begin: Callable[[], None], node: ast.For | ast.While) -> None:
        """Run a loop with an unknown number of rounds. Each round may see other rounds' changes."""

        def once() -> None:
            begin()
            self._is_left(node.body)

        self.frame.loops.append(False)
        for _ in range(2):
            outcome = self.state.tried(once)
            if isinstance(outcome.end, Returned):
                self.frame.returned.append(outcome.end.value)
            self.state.begin()
            self.state.merge([Outcome(outcome.changes, outcome.born)])
            self.state.blur(self.state.end(), _head(node))
        self.frame.loops.pop()
        self._branches([lambda: None, lambda: self.run(node.orelse)])

    def if_(self, node: ast.If) -> None:
        test = truth(self.value(node.test))
        if test is not None:
            self.run(node.body if test else node.orelse)
            return
        self._branches([lambda: self.run(node.body), lambda: self.run(node.orelse)])

    def _branches(self, runs: list[Callable[[], None]]) -> None:
        """Run alternative branches, each from the same state. A branch that raises an error is not taken."""
        outcomes = [self.state.tried(run) for run in runs]
        left = [outcome for outcome in outcomes if not isinstance(outcome.end, Raised)]
        if not left:
            raise Raised
        self.state.merge(left)
        self._end([outcome.end for outcome in left])

    def _end(self, ends: list[Ended | None]) -> None:
        """End the block as its branches end, or remember that some of them ended."""
        returned = [end.value for end in ends if isinstance(end, Returned)]
        if len(returned) == len(ends):
            raise Returned(either(returned))
        self.frame.returned += returned
        self._leave([end for end in ends if not isinstance(end, Returned)])

    def _leave(self, ends: list[Ended | None]) -> None:
        """Leave the loop if all branches do so in one way, or remember that they may."""
        ways = {end.is_break if isinstance(end, Left) else None for end in ends}
        if len(ways) > 1:
            self.frame.loops[-1] = True
        if None not in ways:
            raise next(end for end in ends if end)

    def match(self, node: ast.Match) -> None:
        self.value(node.subject)

        def case(one: ast.match_case) -> None:
            for part in ast.walk(one.pattern):
                name = getattr(part, "name", None) or getattr(part, "rest", None)
                if isinstance(name, str):
                    self.assign(ast.Name(name, ast.Store()), Unknown(name))
            self.run(one.body)

        runs = [lambda one=one: case(one) for one in node.cases]
        self._branches([*runs, lambda: None])

    def try_(self, node: ast.Try | ast.TryStar) -> None:
        """Run a `try` statement. Its body may end anywhere, and one of the handlers follows."""
        try:
            if node.handlers:
                self._handled(node)
            else:
                self.run([*node.body, *node.orelse])
        finally:
            self.run(node.finalbody)

    def _handled(self, node: ast.Try | ast.TryStar) -> None:
        body = self.state.tried(lambda: self.run(node.body))

        def handle(handler: ast.ExceptHandler) -> None:
            self.state.merge([Outcome(), Outcome(body.changes, body.born)])
            if handler.name:
                self.assign(ast.Name(handler.name, ast.Store()), Unknown(handler.name))
            self.run(handler.body)

        runs = [lambda one=one: handle(one) for one in node.handlers]
        self._branches([lambda: self.run([*node.body, *node.orelse]), *runs])

    def with_(self, node: ast.With) -> None:
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, Unknown(source(item.context_expr)) if value is None else value)
        if any("suppress" in source(item.context_expr) for item in node.items):
            self._branches([lambda: self.run(node.body), lambda: None])
        else:
            self.run(node.body)

    def define(self, node: ast.FunctionDef) -> None:
        given = node.args
        places = [argument.arg for argument in (*given.posonlyargs, *given.args)]
        defaults = dict(zip(places[len(places) - len(given.defaults) :], map(self.value, given.defaults), strict=True))
        defaults |= {
            argument.arg: self.value(default)
            for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
            if default is not None
        }
        is_odd = bool(node.decorator_list) or any(
            isinstance(part, ast.Yield | ast.YieldFrom) for part in ast.walk(node)
        )
        found = Named(node.name) if is_odd else Function(node.name, node, self.frame.scopes, defaults)
        self.assign(ast.Name(node.name, ast.Store()), found)

    def class_(self, node: ast.ClassDef) -> None:
        self.classes.add(node.name)
        self.assign(ast.Name(node.name, ast.Store()), Named(node.name))

    def import_(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            whole = alias.name if alias.asname else name
            found = Named(whole if isinstance(node, ast.Import) else f"{node.module}.{alias.name}")
            self.assign(ast.Name(name, ast.Store()), found)

    def global_(self, node: ast.Global | ast.Nonlocal) -> None:
        scopes = self.frame.scopes
        for name in node.names:
            around = [scope for scope in scopes[1:-1] if name in scope] if isinstance(node, ast.Nonlocal) else []
            self.frame.declared[name] = around[-1] if around else scopes[0]

    def return_(self, node: ast.Return) -> None:
        raise Returned(None if node.value is None else self.value(node.value))

    def leave(self, node: ast.Break | ast.Continue) -> None:
        raise Left(is_break=isinstance(node, ast.Break))

    def raise_(self, node: ast.Raise) -> None:
        raise Raised

    def delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.state.remove(self.frame.declared.get(target.id, self.frame.scopes[-1]), target.id)
                continue
            is_key = isinstance(target, ast.Subscript) and isinstance(owner := self.value(target.value), dict)
            if is_key and isinstance(key := self.value(target.slice), str | int):  # type: ignore[attr-defined]
                self.state.remove(owner, key)
            else:
                self.assign(target, Unknown(source(node)))

    def expression(self, node: ast.Expr) -> None:
        self.value(node.value)


def _head(node: ast.For | ast.While) -> str:
    """The first line of a loop."""
    if isinstance(node, ast.While):
        return f"while {source(node.test)}"
    return f"for {source(node.target)} in {source(node.iter)}"


def _nothing(reader: _Reader, node: ast.stmt) -> None:
    """Ignore a statement that sets nothing."""


_STATEMENTS: Final[Mapping[type[ast.stmt], Callable[[_Reader, Any], None]]] = {
    ast.Assign: _Reader.assign_,
    ast.AnnAssign: _Reader.assign_,
    ast.AugAssign: _Reader.augmented,
    ast.For: _Reader.for_,
    ast.While: _Reader.while_,
    ast.If: _Reader.if_,
    ast.Match: _Reader.match,
    ast.With: _Reader.with_,
    ast.Try: _Reader.try_,
    ast.TryStar: _Reader.try_,
    ast.FunctionDef: _Reader.define,
    ast.ClassDef: _Reader.class_,
    ast.Import: _Reader.import_,
    ast.ImportFrom: _Reader.import_,
    ast.Global: _Reader.global_,
    ast.Nonlocal: _Reader.global_,
    ast.Return: _Reader.return_,
    ast.Break: _Reader.leave,
    ast.Continue: _Reader.leave,
    ast.Raise: _Reader.raise_,
    ast.Delete: _Reader.delete,
    ast.Expr: _Reader.expression,
    ast.Pass: _nothing,
    ast.Assert: _nothing,
}
