"""The files beside `rollq.toml` from which episodes are made: digests, and the names that code defines. Imports no such
file."""

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rollq.buffer.common.suggestions import did_you_mean
from rollq.buffer.errors import ConfigError

MISSING: Final = "missing"


def digest_of_file(path: Path) -> str:
    """The digest of a file's content; "missing" without the file, which only a role that makes rows needs. Raises
    `ConfigError`."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def source_files(folder: Path, package: str) -> list[Path]:
    """A top-level module's or package's source files in `folder`; empty if there are none."""
    return [path for path in (folder / f"{package}.py", *sorted((folder / package).rglob("*.py"))) if path.is_file()]


def digest_of_code(folder: Path, package: str) -> str:
    """The source digest of a top-level module or package in `folder`. Raises `ConfigError`."""
    parts = [f"{path.relative_to(folder)} {digest_of_file(path)}" for path in source_files(folder, package)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def problem_of(folder: Path, path: str) -> str:
    """Why the code in `folder` lacks the name at a dotted path; empty if it may have it. Imports nothing."""
    module, _, name = path.rpartition(".")
    place = folder.joinpath(*module.split("."))
    file = next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()), None)
    if file is None:
        return f"no module {module} in {folder}"
    try:
        names = set(_names(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError) as error:
        return f"{file} cannot be read: {error}"
    if name in names or names & {"*", "__getattr__"}:
        return ""
    return f"{file} has no {name!r}{did_you_mean(name, names)}"


def _names(tree: ast.AST) -> Iterator[str]:
    """The names that a module may have: what it defines, imports and assigns anywhere outside functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        else:
            if isinstance(node, ast.Name):
                yield node.id
            yield from _names(node)
